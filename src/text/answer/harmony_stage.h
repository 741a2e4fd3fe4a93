#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "text/answer/answer_piece.h"

namespace nibble {

/// The function that a message goes to, by its header ("<|channel|>commentary to=functions.f ");
/// empty: it goes to none.
[[nodiscard]] std::string_view harmony_function(std::string_view header);

/// Messages of OpenAI's harmony format, which gpt-oss writes: those of the channel "analysis" are
/// what it thinks, those to "functions.NAME" calls, all others content. The prompt ends with
/// <|start|>assistant, so an answer begins in a header. Recipients of no namespace "functions" are
/// tools of the model's own ("python", "browser"), which nobody runs: their messages are thoughts.
/// Text of a message is passed on as it comes, that of calls when it is whole.
class HarmonyStage final : public AnswerStage {
 public:
  explicit HarmonyStage(AnswerPieces& pieces) : pieces_(pieces) {}

  void text(std::string_view text) override;
  void special(std::string_view token) override;
  void finish() override;
  [[nodiscard]] bool thinks() const { return kind_ == Kind::kThought; }

 private:
  enum class Kind : uint8_t { kHeader, kThought, kCall, kContent };

  void begin_message();
  void end_message();

  AnswerPieces& pieces_;
  Kind kind_ = Kind::kHeader;
  bool marked_ = false;  // the header has a special token
  std::string header_;   // of the message, special tokens included
  std::string function_;
  std::string body_;  // of a call
};

}  // namespace nibble
