#include "text/answer/answer_piece.h"

namespace nibble {

std::vector<AnswerPiece> joined_pieces(std::vector<AnswerPiece> pieces) {
  using Kind = AnswerPiece::Kind;
  std::vector<AnswerPiece> out;
  for (AnswerPiece& piece : pieces) {
    const bool text = piece.kind == Kind::kReasoning || piece.kind == Kind::kContent;
    if (text && !out.empty() && out.back().kind == piece.kind) {
      out.back().text += piece.text;
    } else {
      out.push_back(std::move(piece));
    }
  }
  return out;
}

}  // namespace nibble
