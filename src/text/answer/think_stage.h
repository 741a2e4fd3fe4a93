#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "text/answer/answer_piece.h"
#include "text/answer/marker_scanner.h"
#include "text/answer/trimmed_text.h"

namespace nibble {

/// Tells what a model thinks ("<think>...</think>") from what it says, which goes on to the next
/// stage. Written as text, the opening counts only where nothing was said before it. Blanks at both
/// ends of what is thought, and after it, belong to neither.
class ThinkStage final : public AnswerStage, private MarkerScanner::Sink {
 public:
  struct Markers {
    std::string open;
    std::string close;
  };
  /// Whether the prompt ends where the model is thinking already.
  enum class Begin : uint8_t { kOutside, kInside };

  ThinkStage(Markers markers, Begin begin, AnswerPieces& pieces, AnswerStage& next);

  void text(std::string_view text) override { scanner_.text(text); }
  void special(std::string_view token) override { scanner_.special(token); }
  void finish() override;
  [[nodiscard]] bool inside() const { return inside_; }

 private:
  void on_text(std::string_view text) override;
  void on_marker(std::string_view marker, MarkerScanner::Written written) override;
  void on_token(std::string_view token) override;
  void say(std::string_view text);

  Markers markers_;
  AnswerPieces& pieces_;
  AnswerStage& next_;
  MarkerScanner scanner_;
  TrimmedText thought_;
  bool inside_;
  bool said_ = false;           // more than blanks
  bool after_thought_ = false;  // blanks are dropped
};

}  // namespace nibble
