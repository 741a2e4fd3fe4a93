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
};

/// Sums of step `before`, scores of `next` and weights of `now`, which all exist. Rows are weighed
/// between tile instructions, kRows for two products, so that the processor works on both at once.
/// Products alternate between tiles 0, 1 and 2, 3: two are stored while the others are summed.
template <int kCode, bool kFull, int kRows>
void mixed_steps(const AttentionTask& task,
                 const TileTask& t,
                 const TileStep& next,
                 const TileStep& now,
                 const TileStep& before,
                 int64_t here) {
  const TileRows tile_rows(task, t, now.range, now.row_tile, here);
  if (tile_rows.shift[0] == kExponentBase - kLowest) {
    find_first_tops<kCode>(tile_rows);
  }
  RowWeigher<kCode, kFull> rows(tile_rows);
  const int64_t width = t.width;
  uint8_t* scores = t.scores[1 - here];
  const int64_t begin = before.range.begin / 32;
  const int64_t end = before.range.end / 32;
  for (int64_t d = 0; d < 2 * width; d += 4) {
    uint8_t* acc = acc_tile(t, before.row_tile, d);
    const uint8_t* values = value_tile(t.block, 2 * before.range.block, d);
    load_tile<0>(acc);
    load_tile<1>(acc + kTileBytes);
    for (int64_t j = begin; j < end; ++j) {
      load_tile<4>(scores + j * kTileBytes);
      load_tile<6>(values + j * 2 * width * kTileBytes);
      dot_bf16<0, 4, 6>();
      load_tile<7>(values + (j * 2 * width + 1) * kTileBytes);
      rows.next();
      dot_bf16<1, 4, 7>();
      if constexpr (kRows == 2) {
        rows.next();
      }
    }
    if (d + 2 == 2 * width) {
      store_tile<0>(acc);
      store_tile<1>(acc + kTileBytes);
      break;
    }
    load_tile<2>(acc + 2 * kTileBytes);
    load_tile<3>(acc + 3 * kTileBytes);
    for (int64_t j = begin; j < end; ++j) {
      load_tile<5>(scores + j * kTileBytes);
      load_tile<6>(values + (j * 2 * width + 2) * kTileBytes);
      dot_bf16<2, 5, 6>();
      load_tile<7>(values + (j * 2 * width + 3) * kTileBytes);
      rows.next();
      dot_bf16<3, 5, 7>();
      if (j == begin) {
        store_tile<0>(acc);
        store_tile<1>(acc + kTileBytes);
      }
      if constexpr (kRows == 2) {
        rows.next();
      }
    }
    store_tile<2>(acc + 2 * kTileBytes);
    store_tile<3>(acc + 3 * kTileBytes);
  }
  const uint8_t* queries = query_tile(t, next.row_tile, 0);
  const uint8_t* keys = key_tile(t.block, kKeyGroups * next.range.block, 0);
  // Not load_zeros: here a load costs 10 to 40 cycles, see bench/results/cpu_amx.md.
  zero_tile<0>();
  zero_tile<1>();
  for (int64_t k = 0; k < width; ++k) {
    load_tile<4>(queries + k * kTileBytes);
    load_tile<6>(keys + k * kTileBytes);
    dot_bf16<0, 4, 6>();
    load_tile<7>(keys + (width + k) * kTileBytes);
    rows.next();
    dot_bf16<1, 4, 7>();
    if constexpr (kRows == 2) {
      rows.next();
    }
  }
  keys += 2 * width * kTileBytes;
  zero_tile<2>();
  zero_tile<3>();
  for (int64_t k = 0; k < width; ++k) {
    load_tile<5>(queries + k * kTileBytes);
    load_tile<6>(keys + k * kTileBytes);
    dot_bf16<2, 5, 6>();
    load_tile<7>(keys + (width + k) * kTileBytes);
    rows.next();
    dot_bf16<3, 5, 7>();
    if (k == 0) {
      store_tile<0>(scores);
      store_tile<1>(scores + kTileBytes);
    }
    if constexpr (kRows == 2) {
      rows.next();
    }
  }
  store_tile<2>(scores + 2 * kTileBytes);
  store_tile<3>(scores + 3 * kTileBytes);
  const uint32_t skipped = rows.finish();
  if (__builtin_expect(skipped, 0) != 0) {
    weigh_skipped<kCode>(t, tile_rows, now.row_tile, skipped);
  }
}

/// The same, of the steps that exist, one after the other.
template <int kCode>
void plain_steps(const AttentionTask& task,
                 const TileTask& t,
                 const TileStep& next,
                 const TileStep& now,
                 const TileStep& before,
                 int64_t here) {
  if (before.exists()) {
    add_values_of(t, before.row_tile, before.range, t.scores[1 - here]);
  }
  for (int64_t k = 0; next.exists() && k < t.width; ++k) {
    score_step(t, next.range.block, next.row_tile, k, t.scores[1 - here]);
  }
  if (now.exists()) {
    const TileRows rows(task, t, now.range, now.row_tile, here);
    const uint32_t skipped = weigh_rows<kCode>(rows, now.range);
    if (skipped != 0) {
      weigh_skipped<kCode>(t, rows, now.row_tile, skipped);
    }
  }
}

template <int kCode>
void run_steps(const AttentionTask& task,
               const TileTask& t,
               const TileStep& next,
               const TileStep& now,
               const TileStep& before,
               int64_t here) {
  if (!next.exists() || !now.exists() || !before.exists()) {
    return plain_steps<kCode>(task, t, next, now, before, here);
  }
  if (now.range.masked) {
    return mixed_steps<kCode, false, 1>(task, t, next, now, before, here);
  }
  if (t.width <= 2) {
    mixed_steps<kCode, true, 2>(task, t, next, now, before, here);
  } else {
    mixed_steps<kCode, true, 1>(task, t, next, now, before, here);
  }
}

}  // namespace
}  // namespace nibble::cpu
