#include "text/answer/answer_piece.h"

namespace nibble {

void append_piece(std::vector<AnswerPiece>& pieces, AnswerPiece piece) {
  using Kind = AnswerPiece::Kind;
  const bool text = piece.kind == Kind::kReasoning || piece.kind == Kind::kContent;
  if (text && !pieces.empty() && pieces.back().kind == piece.kind) {
    pieces.back().text += piece.text;
  } else {
    pieces.push_back(std::move(piece));
  }
}

std::vector<AnswerPiece> joined_pieces(std::vector<AnswerPiece> pieces) {
  std::vector<AnswerPiece> out;
  for (AnswerPiece& piece : pieces) {
    append_piece(out, std::move(piece));
  }
  return out;
}

}  // namespace nibble
