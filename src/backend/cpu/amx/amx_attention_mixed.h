#pragma once

// Steps of attention over many query rows: tile products of some row tiles and blocks of keys
// together with the weights of others.

#include "backend/cpu/amx/amx_attention_rows.h"

namespace nibble::cpu {
namespace {

/// One row tile and one block of a chunk. Written long before it is read, so that no tile waits.
struct TileStep {
  int32_t row_tile;
  TileRange range;

  [[nodiscard]] bool exists() const { return range.begin < range.end; }
  [[nodiscard]] bool has_whole_block() const { return range.end - range.begin == kKeyBlock; }
};

/// Three steps that are worked on together, and where their scores, then weights lie.
struct Steps {
  const TileStep& next;
  const TileStep& now;
  const TileStep& before;
  uint8_t* outer_scores;  // of before, then of next
  uint8_t* now_scores;
  bool mixed;  // all three exist, and `before` has all keys of its block
  // Up to 64 dims of the sums of a row tile stay in tiles 0 to 3 from step to step.
  bool sums_are_loaded;  // those of before
  bool sums_stay;
};

/// Two products of tile 7 and two tiles in memory, one after the other in tile 6; dot.add<i>() is
/// the i-th. kRows rows are weighed between tile instructions, so that the processor works on both.
template <int kRows, typename Dot, typename Rows>
[[gnu::always_inline]] inline void multiply_pair(const uint8_t* from, Rows& rows, const Dot& dot) {
  const auto weigh = [&](int count) __attribute__((always_inline)) {
    for (int i = 0; i < count; ++i) {
      rows.next();
    }
  };
  load_tile<6>(from);
  dot.template add<0>();
  weigh((kRows + 1) / 2);
  load_tile<6, kTileBytes>(from);
  dot.template add<1>();
  weigh(kRows / 2);
}

/// Sums kSum and kSum + 1 of weighted values.
template <int kSum>
struct ValueDot {
  template <int kIndex>
  [[gnu::always_inline]] void add() const {
    dot_bf16<kSum + kIndex, 7, 6>();
  }
};

/// Scores of two groups of keys, in tiles 4 and 5.
template <int kCode>
struct ScoreDot {
  template <int kIndex>
  [[gnu::always_inline]] void add() const {
    dot_scores<kCode, 4 + kIndex, 7, 6>();
  }
};

/// Sums of `before`, which has all keys of its block: 64 dims and a half of the keys.
template <int kRows, typename Rows>
[[gnu::always_inline]] inline void add_between(
    const TileTask& t, int64_t width, const Steps& s, int64_t part, Rows& rows) {
  const int64_t d = part / 2 * 2;
  const int64_t half = part % 2;
  if (half == 0 && (width > 2 || !s.sums_are_loaded)) {
    load_acc(t, s.before.row_tile, 2 * d);
  }
  const uint8_t* values = value_tile(t.block, 2 * s.before.range.block + half, 2 * d);
  load_tile<7>(weights_at(s.outer_scores) + half * kTileBytes);
  multiply_pair<kRows>(values, rows, ValueDot<0>{});
  if (d + 1 < width) {
    multiply_pair<kRows>(values + 2 * kTileBytes, rows, ValueDot<2>{});
  }
  if (half == 1 && (width > 2 || !s.sums_stay)) {
    store_acc(t, s.before.row_tile, 2 * d);
  }
}

/// Scores of `next` and 32 keys, in tiles 4 and 5.
template <int kCode, int kRows, typename Rows>
[[gnu::always_inline]] inline void score_between(
    const TileTask& t, int64_t key_width, const Steps& s, int64_t pair, Rows& rows) {
  // Not load_zeros: here a load costs 10 to 40 cycles, see bench/results/cpu_amx.md.
  zero_tile<4>();
  zero_tile<5>();
#pragma GCC unroll 4
  for (int64_t k = 0; k < key_width; ++k) {
    load_tile<7>(query_tile(t, s.next.row_tile, k));
    const uint8_t* keys = key_tile(t.block, kKeyGroups * s.next.range.block + 2 * pair, k);
    multiply_pair<kRows>(keys, rows, ScoreDot<kCode>{});
  }
}

/// Sums of `before` and scores of `next`, in turn: scores are stored long after their products.
/// They take the place of those of `before`, whose weights lie in the last two tiles.
template <int kCode, int kRows, typename Rows>
[[gnu::always_inline]] inline void run_products(
    const TileTask& t, int64_t width, int64_t key_width, const Steps& s, Rows& rows) {
  const int64_t parts = (width + 1) / 2;  // of the sums, to a pair of key groups
#pragma GCC unroll 2
  for (int64_t pair = 0; pair < kKeyGroups / 2; ++pair) {
    score_between<kCode, kCode == 1 ? kRows : 2 * kRows>(t, key_width, s, pair, rows);
#pragma GCC unroll 2
    for (int64_t part = pair * parts; part < (pair + 1) * parts; ++part) {
      add_between<kRows>(t, width, s, part, rows);
    }
    uint8_t* scores = s.outer_scores + 2 * pair * kTileBytes;
    store_tile<4>(scores);
    store_tile<5, kTileBytes>(scores);
  }
}

/// Sums of step `before`, scores of `next` and weights of `now`. kAll: its row tile has 16 rows,
/// which all see the whole block. kWidth: that of the block if it is not 0; the code is then one
/// straight line.
template <int kCode, bool kAll, int kWidth>
void mixed_steps(const AttentionTask& task, const TileTask& t, const Steps& s) {
  constexpr int kRows = kWidth == 2 ? 2 : 1;  // by two products of values
  const TileRows tile_rows(task, t, s.now.range, s.now.row_tile, s.now_scores);
  if (tile_rows.have_no_top<kCode>()) {
    find_first_tops<kCode>(tile_rows);
  }
  RowWeigher<kCode, kAll, kAll> rows(tile_rows);
  const int64_t width = kWidth > 0 ? kWidth : t.width;
  const int64_t key_width = kWidth > 0 ? (kCode == 1 ? kWidth : kWidth / 2) : t.block.key_width;
  run_products<kCode, kRows>(t, width, key_width, s, rows);
  const uint32_t skipped = rows.finish();
  if (__builtin_expect(skipped, 0) != 0) {
    if (s.sums_stay) {  // those of this row tile
      store_acc(t, s.before.row_tile, 0);
    }
    weigh_skipped<kCode>(t, tile_rows, s.now.row_tile, skipped);
    if (s.sums_stay) {
      load_acc(t, s.before.row_tile, 0);
    }
  }
}

/// The same, of the steps that exist, one after the other.
template <int kCode>
void plain_steps(const AttentionTask& task, const TileTask& t, const Steps& s) {
  if (s.before.exists()) {
    add_values_of(t, s.before.row_tile, s.before.range, weights_at(s.outer_scores));
  }
  for (int64_t k = 0; s.next.exists() && k < t.block.key_width; ++k) {
    score_step<kCode>(t, s.next.range.block, s.next.row_tile, k, s.outer_scores);
  }
  if (s.now.exists()) {
    const TileRows rows(task, t, s.now.range, s.now.row_tile, s.now_scores);
    const uint32_t skipped = weigh_rows<kCode>(rows, s.now.range);
    if (skipped != 0) {
      weigh_skipped<kCode>(t, rows, s.now.row_tile, skipped);
    }
  }
}

template <int kCode, bool kAll>
void mix_steps(const AttentionTask& task, const TileTask& t, const Steps& s) {
  switch (t.width) {
    case 2:
      return mixed_steps<kCode, kAll, 2>(task, t, s);
    case 4:
      return mixed_steps<kCode, kAll, 4>(task, t, s);
    default:
      return mixed_steps<kCode, kAll, 0>(task, t, s);
  }
}

template <int kCode>
void run_steps(const AttentionTask& task, const TileTask& t, const Steps& s) {
  if (!s.mixed) {
    return plain_steps<kCode>(task, t, s);
  }
  const bool all = !s.now.range.masked && s.now.row_tile * 16 + 16 <= t.rows;
  all ? mix_steps<kCode, true>(task, t, s) : mix_steps<kCode, false>(task, t, s);
}

}  // namespace
}  // namespace nibble::cpu
