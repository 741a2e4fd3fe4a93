#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "text/answer/answer_parser.h"
#include "text/text_stream.h"

namespace nibble {

/// Makes the pieces of one answer from its tokens: text without special tokens that ends at stop
/// strings (TextStream), taken apart (AnswerParser). Where the form has no parts, special tokens
/// are shown or hidden as TextStream does, else those that mean something are never shown, and the
/// others as `specials` says. The tokenizer must outlive it. Not thread-safe.
class AnswerStream final {
 public:
  struct Options {
    AnswerParser::Options parser;
    std::vector<std::string> stops;
    StopText stop_text = StopText::kOmit;
    DecodeSpecials specials = DecodeSpecials::kSkip;
  };

  AnswerStream(const Tokenizer& tokenizer, Options options);

  /// What this token makes certain; nothing after a stop.
  [[nodiscard]] std::vector<AnswerPiece> push(int32_t token);
  /// The rest, after the last token.
  [[nodiscard]] std::vector<AnswerPiece> finish();
  /// A stop string was found: the finish reason is "stop", whatever the engine says later.
  [[nodiscard]] bool stopped() const { return text_.stopped(); }
  [[nodiscard]] const std::string& stop_string() const { return text_.stop_string(); }
  [[nodiscard]] bool thinks() const { return parser_.thinks(); }

 private:
  const Tokenizer& tokenizer_;
  bool has_parts_;
  TextStream text_;
  AnswerParser parser_;
};

}  // namespace nibble
