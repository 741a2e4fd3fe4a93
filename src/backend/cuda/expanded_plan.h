#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/cuda/expanded.h"
#include "backend/step.h"

namespace nibble::cuda {

/// Rows of a sequence in a step: its last ones.
struct ExpandedSequence {
  int32_t sequence = 0;   // of the step
  int32_t first_row = 0;  // of the step
  int32_t rows = 0;
  int32_t kv_len = 0;  // with these rows
};

/// Microseconds that a sequence's attention is expected to take on one H200, by what is multiplied
/// and moved: of rows over the cache as it is, with the products of their heads; and with keys and
/// values made for it.
[[nodiscard]] double absorbed_cost(int64_t heads, const ExpandedSequence& sequence);
[[nodiscard]] double expanded_cost(int64_t heads, const ExpandedSequence& sequence);

/// Whether keys and values are to be made for a sequence. Its own lengths decide, not what else the
/// step holds.
[[nodiscard]] bool is_expanded(int64_t heads, const ExpandedSequence& sequence);

/// The rows of a step of `rows` that belong to none of the sequences.
[[nodiscard]] std::vector<RowRange> rows_beside(std::span<const ExpandedSequence> sequences,
                                                int64_t rows);

/// Bytes of a token of a piece: its gathered row, keys and values.
[[nodiscard]] constexpr int64_t expanded_token_bytes(int64_t heads) {
  return 2 * (kExpandedRank + kExpandedRope + heads * (kExpandedNope + kExpandedValue));
}
/// Tokens of the largest piece of sequences with up to `positions` tokens, a multiple of
/// kExpandedTile: what 512 MiB hold.
[[nodiscard]] int32_t expanded_piece_tokens(int64_t heads, int64_t positions);

/// Pieces of at most `piece_tokens` tokens, one behind the other. How a sequence is cut depends on
/// it alone.
[[nodiscard]] std::vector<ExpandedPiece> cut_into_pieces(
    std::span<const ExpandedSequence> sequences, int32_t piece_tokens);

}  // namespace nibble::cuda
