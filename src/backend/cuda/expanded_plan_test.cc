#include "backend/cuda/expanded_plan.h"

#include <algorithm>
#include <random>

#include <gtest/gtest.h>

namespace nibble::cuda {
namespace {

constexpr int32_t kTile = kExpandedTile;

ExpandedSequence lengths(int32_t rows, int32_t kv_len) { return {.rows = rows, .kv_len = kv_len}; }

TEST(ExpandedCost, ManyRowsAreExpandedAndFewAreNot) {
  for (const int64_t heads : {16, 32, 64, 128}) {
    for (const int32_t kv_len : {1024, 8192, 16384, 131072}) {
      SCOPED_TRACE(testing::Message() << heads << " heads, " << kv_len << " tokens");
      for (const int32_t rows : {1, 2, 17, 63}) {
        EXPECT_FALSE(is_expanded(heads, lengths(rows, kv_len))) << rows;
      }
      for (const int32_t rows : {1024, 8192, 65536}) {
        EXPECT_TRUE(rows > kv_len || is_expanded(heads, lengths(rows, kv_len))) << rows;
      }
    }
  }
}

// Of many sequences, each with proposals, none is worth keys and values of its own.
TEST(ExpandedCost, FewRowsStayAbsorbedWhateverTheyCostAlone) {
  EXPECT_LT(expanded_cost(16, lengths(16, 8192)), absorbed_cost(16, lengths(16, 8192)));
  EXPECT_FALSE(is_expanded(16, lengths(16, 8192)));
  EXPECT_FALSE(is_expanded(16, lengths(63, 8192)));
  EXPECT_TRUE(is_expanded(16, lengths(64, 8192)));
}

TEST(ExpandedCost, SharesOfAPromptTurnBetweenOneAndFiveHundredRows) {
  for (const int32_t kv_len : {4096, 8192, 32768}) {
    EXPECT_FALSE(is_expanded(64, lengths(100, kv_len))) << kv_len;
    EXPECT_TRUE(is_expanded(64, lengths(512, kv_len))) << kv_len;
  }
}

struct Measured {
  int64_t heads = 0;
  int32_t rows = 0;
  double absorbed = 0;
  double expanded = 0;
};

/// Microseconds of a chunk of rows behind 8192 tokens on an H200: bench/results/h200-mla.json.
constexpr Measured kMeasured[] = {
    {64, 16, 247.8, 338.3},    {64, 128, 263.4, 343.5},     {64, 192, 500.5, 347.4},
    {64, 512, 1008.1, 490.8},  {64, 8192, 23600.1, 7153.6}, {128, 16, 256.8, 591.8},
    {128, 128, 509.7, 607.6},  {128, 192, 752.5, 725.1},    {128, 256, 998.1, 732.7},
    {128, 2048, 8590.3, 3077}, {16, 16, 244.0, 186.4},      {16, 512, 270.7, 200.6},
    {16, 2048, 1089.8, 368.6}};

TEST(ExpandedCost, IsNearWhatWasMeasuredAndChoosesTheFaster) {
  for (const Measured& row : kMeasured) {
    SCOPED_TRACE(testing::Message() << row.heads << " heads, " << row.rows << " rows");
    const ExpandedSequence chunk = lengths(row.rows, 8192 + row.rows);
    EXPECT_NEAR(absorbed_cost(row.heads, chunk) / row.absorbed, 1, 0.15);
    EXPECT_NEAR(expanded_cost(row.heads, chunk) / row.expanded, 1, 0.15);
    EXPECT_EQ(expanded_cost(row.heads, chunk) < absorbed_cost(row.heads, chunk),
              row.expanded < row.absorbed);
  }
}

TEST(ExpandedCost, AWholePromptCostsAThirdToHalf) {
  for (const int32_t tokens : {8192, 32768}) {
    const ExpandedSequence whole = lengths(tokens, tokens);
    const double ratio = expanded_cost(64, whole) / absorbed_cost(64, whole);
    EXPECT_GT(ratio, 0.25) << tokens;
    EXPECT_LT(ratio, 0.5) << tokens;
  }
}

TEST(ExpandedPieces, HoldWhatHalfAGibibyteHolds) {
  EXPECT_EQ(expanded_piece_tokens(64, 1 << 18), 15744);
  EXPECT_EQ(expanded_piece_tokens(128, 1 << 18), 7936);
  EXPECT_EQ(expanded_piece_tokens(64, 1000), 1024);
  for (const int64_t heads : {1, 64, 128, 1024}) {
    const int64_t tokens = expanded_piece_tokens(heads, 1 << 18);
    EXPECT_GT(tokens, 0);
    EXPECT_EQ(tokens % kTile, 0);
    EXPECT_LE(tokens * expanded_token_bytes(heads), int64_t{512} << 20);
  }
}

/// Goes through the pieces as the kernel does: every row meets every token that it sees once, in
/// their order, and none that it does not; only rows that are finished are given out.
void check_pieces(const std::vector<ExpandedSequence>& sequences, int32_t piece_tokens) {
  int32_t rows = 0;
  for (const ExpandedSequence& sequence : sequences) {
    rows = std::max(rows, sequence.first_row + sequence.rows);
  }
  std::vector<int32_t> met(static_cast<size_t>(rows), 0);
  std::vector<bool> given(static_cast<size_t>(rows), false);
  for (const ExpandedPiece& piece : cut_into_pieces(sequences, piece_tokens)) {
    ASSERT_GT(piece.count, 0);
    ASSERT_LE(piece.tokens, piece_tokens);
    ASSERT_EQ(piece.tokens % kTile, 0);
    int32_t base = 0;
    int32_t blocks = 0;
    for (int32_t i = 0; i < piece.count; ++i) {
      const ExpandedSegment& segment = piece.segments[i];
      ASSERT_EQ(segment.base, base);
      ASSERT_EQ(segment.block, blocks);
      ASSERT_GT(segment.rows, 0);
      ASSERT_GT(segment.tokens, 0);
      base += (segment.tokens + kTile - 1) / kTile * kTile;
      for (int32_t row = 0; row < segment.rows; row += kTile, ++blocks) {
        const int32_t count = std::min(kTile, segment.rows - row);
        const int32_t place = segment.first_position + row - segment.first_token;
        ASSERT_GT(place + count, 0) << "a block without tokens";
        for (int32_t r = 0; r < count; ++r) {
          const auto at = static_cast<size_t>(segment.first_row + row + r);
          ASSERT_FALSE(given[at]);
          const int32_t seen = std::min(place + r + 1, segment.tokens);
          if (seen > 0) {
            ASSERT_EQ(met[at], segment.first_token);
            met[at] += seen;
          }
          given[at] = place + count <= segment.tokens;
        }
      }
      for (int32_t j = 0; j < i; ++j) {
        ASSERT_NE(piece.segments[j].sequence, segment.sequence) << "two parts in one piece";
      }
    }
    ASSERT_EQ(piece.tokens, base);
    ASSERT_EQ(piece.blocks, blocks);
  }
  for (const ExpandedSequence& sequence : sequences) {
    for (int32_t i = 0; i < sequence.rows; ++i) {
      const auto at = static_cast<size_t>(sequence.first_row + i);
      ASSERT_TRUE(given[at]) << "row " << at;
      ASSERT_EQ(met[at], sequence.kv_len - sequence.rows + i + 1) << "row " << at;
    }
  }
}

TEST(ExpandedPieces, EveryRowMeetsItsTokensOnce) {
  check_pieces({{.sequence = 0, .first_row = 0, .rows = 1, .kv_len = 1}}, kTile);
  check_pieces({{.sequence = 2, .first_row = 5, .rows = 700, .kv_len = 1301}}, 512);
  check_pieces({{.sequence = 0, .first_row = 0, .rows = 640, .kv_len = 640}}, kTile);
  std::mt19937 random(4);
  for (int round = 0; round < 200; ++round) {
    std::vector<ExpandedSequence> sequences;
    int32_t row = static_cast<int32_t>(random() % 7);
    const auto count = static_cast<int32_t>(1 + random() % (round % 10 == 0 ? 80 : 5));
    for (int32_t s = 0; s < count; ++s) {
      const auto rows = static_cast<int32_t>(1 + random() % 900);
      const auto cached = static_cast<int32_t>(random() % 3 == 0 ? random() % 2000 : 0);
      sequences.push_back(
          {.sequence = 3 * s, .first_row = row, .rows = rows, .kv_len = rows + cached});
      row += rows + static_cast<int32_t>(random() % 3);
    }
    check_pieces(sequences, kTile * static_cast<int32_t>(1 + random() % 12));
  }
}

TEST(ExpandedPieces, ASequenceIsCutAloneAsBesideOthers) {
  const ExpandedSequence own{.sequence = 1, .first_row = 400, .rows = 600, .kv_len = 1500};
  const auto parts_of = [](const std::vector<ExpandedPiece>& pieces) {
    std::vector<std::pair<int32_t, int32_t>> parts;
    for (const ExpandedPiece& piece : pieces) {
      for (int32_t i = 0; i < piece.count; ++i) {
        if (piece.segments[i].sequence == 1) {
          parts.emplace_back(piece.segments[i].first_token, piece.segments[i].tokens);
        }
      }
    }
    return parts;
  };
  const ExpandedSequence other{.sequence = 0, .first_row = 0, .rows = 400, .kv_len = 400};
  const auto alone = parts_of(cut_into_pieces(std::vector{own}, 1024));
  EXPECT_EQ(alone.size(), 2U);
  EXPECT_EQ(alone, parts_of(cut_into_pieces(std::vector{other, own}, 1024)));
}

TEST(ExpandedRows, WhatLiesBesideStaysAbsorbed) {
  using Ranges = std::vector<RowRange>;
  EXPECT_EQ(rows_beside({}, 7), (Ranges{{0, 7}}));
  const std::vector<ExpandedSequence> all = {{.first_row = 4, .rows = 3},
                                             {.first_row = 0, .rows = 4}};
  EXPECT_EQ(rows_beside(all, 7), Ranges{});
  EXPECT_EQ(rows_beside(all, 9), (Ranges{{7, 2}}));
  const std::vector<ExpandedSequence> two = {{.first_row = 2, .rows = 3},
                                             {.first_row = 8, .rows = 1}};
  EXPECT_EQ(rows_beside(two, 12), (Ranges{{0, 2}, {5, 3}, {9, 3}}));
}

}  // namespace
}  // namespace nibble::cuda
