#pragma once

#include <string_view>

#include "text/answer/answer_piece.h"

namespace nibble {

/// Content as it is.
class PlainStage final : public AnswerStage {
 public:
  explicit PlainStage(AnswerPieces& pieces) : pieces_(pieces) {}

  void text(std::string_view text) override { pieces_.content(text); }
  void special(std::string_view token) override { pieces_.token(token); }
  void finish() override {}

 private:
  AnswerPieces& pieces_;
};

}  // namespace nibble
