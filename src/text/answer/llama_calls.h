#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/answer/answer_piece.h"

namespace nibble {

/// Calls of Llama 3: an answer that begins with "{" or <|python_tag|> is held back whole, and is
/// calls where all of it is objects that name one of the functions; else it is content.
class LlamaCalls final : public AnswerStage {
 public:
  LlamaCalls(std::vector<std::string> functions, AnswerPieces& pieces);

  void text(std::string_view text) override;
  void special(std::string_view token) override;
  void finish() override;

 private:
  enum class State : uint8_t { kBegin, kHeld, kContent };

  std::vector<std::string> functions_;
  AnswerPieces& pieces_;
  State state_ = State::kBegin;
  std::string held_;
};

}  // namespace nibble
