#pragma once

// Steps of attention over many query rows: tile products of some row tiles and blocks of keys
// together with the weights of others.

#include "backend/cpu/amx/amx_attention_rows.h"

namespace nibble::cpu {
namespace {

/// One row tile and one block of a chunk. Written long before it is read, so that no tile waits.
struct TileStep {
  int64_t row_tile;
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
};

template <int kTile, int kAt>
[[gnu::always_inline]] inline void load_pair(const uint8_t* from) {
  load_tile<kTile, kAt>(from);
  load_tile<kTile + 1, kAt + kTileBytes>(from);
}

template <int kTile, int kAt>
[[gnu::always_inline]] inline void store_pair(uint8_t* to) {
  store_tile<kTile, kAt>(to);
  store_tile<kTile + 1, kAt + kTileBytes>(to);
}

/// Tiles kSum and kSum + 1 += tile kRowTile · two tiles in memory. Rows are weighed between tile
/// instructions, kRows for two products, so that the processor works on both at once.
template <int kSum, int kRowTile, int kRows, int kAt, typename Rows>
[[gnu::always_inline]] inline void multiply_pair(const uint8_t* from, Rows& rows) {
  load_pair<6, kAt>(from);
  dot_bf16<kSum, kRowTile, 6>();
  rows.next();
  dot_bf16<kSum + 1, kRowTile, 7>();
  if constexpr (kRows == 2) {
    rows.next();
  }
}

/// Sums of `before`, which has all keys of its block; its weights are in tiles 4 and 5, the first
/// queries of `next` take their places. Sums alternate between tiles 0, 1 and 2, 3: two are stored
/// while the others grow, which is faster than four at a time for one or two blocks.
template <int kRows, typename Rows>
[[gnu::always_inline]] inline void add_between(
    const TileTask& t, int64_t width, const Steps& s, const uint8_t* queries, Rows& rows) {
  uint8_t* acc = acc_tile(t, s.before.row_tile, 0);
  const uint8_t* values = value_tile(t.block, 2 * s.before.range.block, 0);
  const uint8_t* later = values + 2 * width * kTileBytes;  // of 32 keys more
#pragma GCC unroll 2
  for (int64_t d = 0; d < width; d += 2) {
    load_pair<0, 0>(acc);
    multiply_pair<0, 4, kRows, 0>(values, rows);
    multiply_pair<0, 5, kRows, 0>(later, rows);
    if (d + 1 == width) {
      store_pair<0, 0>(acc);
      load_pair<4, 0>(queries);
      break;
    }
    load_pair<2, 2 * kTileBytes>(acc);
    multiply_pair<2, 4, kRows, 2 * kTileBytes>(values, rows);
    if (d + 2 == width) {
      load_tile<4>(queries);
    }
    store_pair<0, 0>(acc);
    multiply_pair<2, 5, kRows, 2 * kTileBytes>(later, rows);
    if (d + 2 == width) {
      load_tile<5, kTileBytes>(queries);
    }
    store_pair<2, 2 * kTileBytes>(acc);
    acc += 4 * kTileBytes;
    values += 4 * kTileBytes;
    later += 4 * kTileBytes;
  }
}

/// Scores of `next`. The first queries are in tiles 4 and 5, where those of 64 dims stay.
template <int kRows, typename Rows>
[[gnu::always_inline]] inline void score_between(
    const TileTask& t, int64_t width, const Steps& s, const uint8_t* queries, Rows& rows) {
  const uint8_t* keys = key_tile(t.block, kKeyGroups * s.next.range.block, 0);
  const uint8_t* later = keys + 2 * width * kTileBytes;  // 32 keys more
  // Not load_zeros: here a load costs 10 to 40 cycles, see bench/results/cpu_amx.md.
  zero_tile<0>();
  zero_tile<1>();
#pragma GCC unroll 2
  for (int64_t k = 0; k < width; k += 2) {
    if (k > 0) {
      load_pair<4, 0>(queries + k * kTileBytes);
    }
    multiply_pair<0, 4, kRows, 0>(keys + 2 * k * kTileBytes, rows);
    if (k + 1 < width) {
      multiply_pair<0, 5, kRows, 2 * kTileBytes>(keys + 2 * k * kTileBytes, rows);
    }
  }
  zero_tile<2>();
  zero_tile<3>();
#pragma GCC unroll 2
  for (int64_t k = 0; k < width; k += 2) {
    if (width > 2) {
      load_pair<4, 0>(queries + k * kTileBytes);
    }
    multiply_pair<2, 4, kRows, 0>(later + 2 * k * kTileBytes, rows);
    if (k == 0) {
      store_pair<0, 0>(s.outer_scores);
    }
    if (k + 1 < width) {
      multiply_pair<2, 5, kRows, 2 * kTileBytes>(later + 2 * k * kTileBytes, rows);
    }
  }
  store_pair<2, 2 * kTileBytes>(s.outer_scores);
}

/// Sums of step `before`, scores of `next` and weights of `now`. kAll: its row tile has 16 rows,
/// which all see the whole block. kWidth: that of the block if it is not 0; the code is then one
/// straight line.
template <int kCode, bool kAll, int kWidth>
void mixed_steps(const AttentionTask& task, const TileTask& t, const Steps& s) {
  constexpr int kRows = kWidth == 2 ? 2 : 1;
  const TileRows tile_rows(task, t, s.now.range, s.now.row_tile, s.now_scores);
  if (tile_rows.shift[0] == ExponentRange<kCode>::kBase - kLowest) {
    find_first_tops<kCode>(tile_rows);
  }
  RowWeigher<kCode, kAll, kAll> rows(tile_rows);
  const int64_t width = kWidth > 0 ? kWidth : t.width;
  const uint8_t* queries = query_tile(t, s.next.row_tile, 0);
  load_pair<4, 0>(s.outer_scores);
  add_between<kRows>(t, width, s, queries, rows);
  score_between<kRows>(t, width, s, queries, rows);
  const uint32_t skipped = rows.finish();
  if (__builtin_expect(skipped, 0) != 0) {
    weigh_skipped<kCode>(t, tile_rows, s.now.row_tile, skipped);
  }
}

/// The same, of the steps that exist, one after the other.
template <int kCode>
void plain_steps(const AttentionTask& task, const TileTask& t, const Steps& s) {
  if (s.before.exists()) {
    add_values_of(t, s.before.row_tile, s.before.range, s.outer_scores);
  }
  for (int64_t k = 0; s.next.exists() && k < t.width; ++k) {
    score_step(t, s.next.range.block, s.next.row_tile, k, s.outer_scores);
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
  if (!s.next.exists() || !s.now.exists() || !s.before.has_whole_block()) {
    return plain_steps<kCode>(task, t, s);
  }
  const bool all = !s.now.range.masked && s.now.row_tile * 16 + 16 <= t.rows;
  all ? mix_steps<kCode, true>(task, t, s) : mix_steps<kCode, false>(task, t, s);
}

}  // namespace
}  // namespace nibble::cpu
