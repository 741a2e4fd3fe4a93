#include "backend/cuda/expanded_plan.h"

#include <algorithm>

#include "base/check.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int32_t kTile = kExpandedTile;
constexpr int64_t kPieceBytes = int64_t{512} << 20;
constexpr int32_t kMostTokens = int32_t{1} << 20;  // of a piece, whatever the heads

// Rates of one H200, FLOP and bytes per microsecond, from what latent_bench measured of prefill
// (bench/results/h200-mla.json): 45 shapes of 16, 64 and 128 heads, of which the costs below choose
// the faster form. From 16 rows on they are within 9 % of what was measured, but for whole
// prompts of 2048 tokens, where they are a fifth to a quarter below it.
constexpr double kAbsorbedRate = 600e6;
constexpr double kExpandedRate = 690e6;
constexpr double kProductRate = 670e6;
constexpr double kMemoryRate = 4e6;
constexpr double kLaunch = 4.0;  // microseconds of a launch that nothing hides
constexpr int64_t kMultiprocessors = 132;
constexpr int64_t kAbsorbedQueries = 64;  // of a block: a row has one for each head

// Sequences of few rows come in numbers, as proposals that are verified: their blocks fill the
// multiprocessors together, where each alone would leave most of them idle. They stay absorbed.
constexpr int32_t kFewestRows = 64;

constexpr int32_t kRowDim = kExpandedRank + kExpandedRope;

/// Pairs of a row and a token that it sees, of a sequence's last `rows`.
double pairs(const ExpandedSequence& sequence, double rows) {
  return rows * (sequence.kv_len - rows) + rows * (rows + 1) / 2;
}

/// The share of the multiprocessors that so many blocks keep busy; of many, causal rows are longer
/// and shorter and fill the gaps.
double busy(int64_t blocks) {
  const int64_t rounds = ceil_div(blocks, kMultiprocessors);
  return rounds >= 4 ? 1.0
                     : static_cast<double>(blocks) / static_cast<double>(rounds * kMultiprocessors);
}

}  // namespace

double absorbed_cost(int64_t heads, const ExpandedSequence& sequence) {
  // Blocks of few queries are as long as full ones.
  const int64_t blocks = ceil_div(sequence.rows * heads, kAbsorbedQueries);
  const double seen = pairs(sequence, sequence.rows) / sequence.rows;  // tokens, of a mean row
  const double attention = 2 * seen * static_cast<double>(blocks * kAbsorbedQueries) *
                           (kRowDim + kExpandedRank) / kAbsorbedRate / busy(blocks);
  const double products = 2.0 * sequence.rows * static_cast<double>(heads) * kExpandedRank *
                          (kExpandedNope + kExpandedValue) / kProductRate;
  return attention + products + 3 * kLaunch;
}

double expanded_cost(int64_t heads, const ExpandedSequence& sequence) {
  const auto count = static_cast<double>(heads);
  const int32_t tokens = round_up(sequence.kv_len, kTile);
  // Blocks of few rows are as long as full ones.
  const int32_t rows = std::min(round_up(sequence.rows, kTile), sequence.kv_len);
  const double attention = 2 * pairs(sequence, rows) * count *
                           (kExpandedNope + kExpandedRope + kExpandedValue) / kExpandedRate /
                           busy(heads * ceil_div(sequence.rows, kTile));
  const double products =
      2.0 * tokens * count * kExpandedRank * (kExpandedNope + kExpandedValue) / kProductRate;
  const int32_t most = expanded_piece_tokens(heads, kMostTokens);
  const int64_t pieces = ceil_div(tokens, most);
  const double gathered = 2.0 * tokens * kRowDim * 2;
  const double states =
      2.0 * static_cast<double>(pieces - 1) * sequence.rows * count * kExpandedState * 4;
  return attention + products + (gathered + states) / kMemoryRate +
         4 * kLaunch * static_cast<double>(pieces);
}

bool is_expanded(int64_t heads, const ExpandedSequence& sequence) {
  return sequence.rows >= kFewestRows &&
         expanded_cost(heads, sequence) < absorbed_cost(heads, sequence);
}

std::vector<RowRange> rows_beside(std::span<const ExpandedSequence> sequences, int64_t rows) {
  std::vector<ExpandedSequence> sorted(sequences.begin(), sequences.end());
  std::ranges::sort(sorted, {}, &ExpandedSequence::first_row);
  std::vector<RowRange> beside;
  int64_t first = 0;
  const auto add = [&](int64_t end) {
    if (end > first) {
      beside.push_back({.first = first, .count = end - first});
    }
  };
  for (const ExpandedSequence& sequence : sorted) {
    add(sequence.first_row);
    first = int64_t{sequence.first_row} + sequence.rows;
  }
  add(rows);
  return beside;
}

int32_t expanded_piece_tokens(int64_t heads, int64_t positions) {
  const int64_t held = kPieceBytes / expanded_token_bytes(heads) / kTile * kTile;
  return static_cast<int32_t>(
      std::min({held, round_up(positions, int64_t{kTile}), int64_t{kMostTokens}}));
}

std::vector<ExpandedPiece> cut_into_pieces(std::span<const ExpandedSequence> sequences,
                                           int32_t piece_tokens) {
  CHECK(piece_tokens >= kTile && piece_tokens % kTile == 0);
  std::vector<ExpandedPiece> pieces;
  const auto add = [&](ExpandedSegment segment) {
    const int32_t tokens = round_up(segment.tokens, kTile);
    if (pieces.empty() || pieces.back().count == ExpandedPiece::kSegments ||
        pieces.back().tokens + tokens > piece_tokens) {
      pieces.emplace_back();
    }
    ExpandedPiece& piece = pieces.back();
    segment.base = piece.tokens;
    segment.block = piece.blocks;
    piece.segments[piece.count++] = segment;
    piece.tokens += tokens;
    piece.blocks += ceil_div(segment.rows, kTile);
  };
  // Two parts of a sequence are never in one piece: any two that follow one another are more than
  // a piece holds. The later one needs the states that the earlier one leaves.
  for (const ExpandedSequence& sequence : sequences) {
    CHECK(sequence.rows > 0 && sequence.rows <= sequence.kv_len);
    const int32_t parts = ceil_div(sequence.kv_len, piece_tokens);
    const int32_t part = round_up(ceil_div(sequence.kv_len, parts), kTile);
    const int32_t position = sequence.kv_len - sequence.rows;
    for (int32_t first = 0; first < sequence.kv_len; first += part) {
      // Blocks of rows in front of these tokens are finished.
      const int32_t done = std::max(0, first - position) / kTile * kTile;
      add({.sequence = sequence.sequence,
           .first_row = sequence.first_row + done,
           .rows = sequence.rows - done,
           .first_position = position + done,
           .first_token = first,
           .tokens = std::min(part, sequence.kv_len - first)});
    }
  }
  return pieces;
}

}  // namespace nibble::cuda
