#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/answer/answer_piece.h"
#include "text/answer/call_text.h"
#include "text/answer/json_extent.h"
#include "text/answer/marker_scanner.h"
#include "text/answer/trimmed_text.h"

namespace nibble {

/// How a family marks its calls.
struct CallSyntax {
  std::string begin;                 // of a call, or of a list of them
  std::string end;                   // empty: the next one's begin, or the end of the answer
  std::vector<std::string> inner;    // special tokens that are part of a call
  std::vector<std::string> ignored;  // what stands around all calls
  ParsedCalls (*parse)(std::string_view body);
};

/// Tells calls that stand between markers from content. A call that does not parse is content, with
/// its markers, and the log says so. Blanks beside calls are dropped. An end within a string of
/// JSON is a part of that string.
class BracketedCalls final : public AnswerStage, private MarkerScanner::Sink {
 public:
  BracketedCalls(CallSyntax syntax, AnswerPieces& pieces);

  void text(std::string_view text) override { scanner_.text(text); }
  void special(std::string_view token) override { scanner_.special(token); }
  void finish() override;

 private:
  void on_text(std::string_view text) override;
  void on_marker(std::string_view marker, MarkerScanner::Written written) override;
  void on_token(std::string_view token) override;
  void begin_call();
  void end_call(std::string_view end);
  void add_to_call(std::string_view text);

  CallSyntax syntax_;
  AnswerPieces& pieces_;
  MarkerScanner scanner_;
  TrimmedText content_;
  std::string body_;
  JsonExtent extent_;  // of body_
  bool in_call_ = false;
};

}  // namespace nibble
