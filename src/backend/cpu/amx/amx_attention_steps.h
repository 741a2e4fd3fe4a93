#pragma once

// Steps of attention in tiles: scores of a row tile of 16 query rows and a block of keys, their
// weights, and the weighted sums of values.

#include "backend/cpu/amx/amx_attention_pack.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kKeyGroups = kKeyBlock / 16;  // tiles of scores of a row tile

/// What a task works on; tiles are 1024 bytes each.
struct TileTask {
  int64_t rows = 0;     // tokens * group
  int64_t width = 0;    // head_dim in blocks of 32
  bool narrow = false;  // up to 16 rows
  uint8_t* queries;     // [row tile][width] rows of 32 dims; narrow: transposed
  float* q_sum;         // [rows, padded to 16]
  float* sums;          // [row][16] weights by lane
  float* offsets;       // [row][16]
  float* shift;         // [row] ExponentRange::kBase - top
  int32_t* positions;   // [row], -1 for rows that are not there
  uint8_t* acc;         // [row tile][2 width] of 16 dims
  // Of two row tiles in turn, so that tiles are not loaded right after they were stored; the rows
  // of weights take the place of those of the first scores.
  uint8_t* scores[2];  // [kKeyGroups]
  TileBlock block;
  uint8_t* copies;  // of keys that do not lie in one page, see find_block
};

/// The keys of one block that some row of a row tile sees.
struct TileRange {
  int32_t block;  // of the chunk
  int32_t at;     // position of the block
  int32_t begin;  // within the block, multiples of 32
  int32_t end;
  int32_t first;  // of the block's keys that count
  bool masked;    // not all rows see the whole block
};

inline uint8_t* query_tile(const TileTask& t, int64_t row_tile, int64_t k) {
  return t.queries + (row_tile * t.width + k) * kTileBytes;
}

inline uint8_t* acc_tile(const TileTask& t, int64_t row_tile, int64_t d) {
  return t.acc + (row_tile * 2 * t.width + d) * kTileBytes;
}

inline void load_query_tiles(const AttentionTask& task, const TileTask& t) {
  const int64_t width = 32 * t.width;
  float q[kMaxHeadDim];
  for (int64_t r = 0; r < round_up(t.rows, 16); ++r) {
    if (r < t.rows) {
      t.positions[r] = static_cast<int32_t>(task.first_position + r / task.group);
      load_query(task, r, width, q);
    } else {
      t.positions[r] = -1;
      __builtin_memset(q, 0, static_cast<size_t>(width) * 4);
    }
    t.q_sum[r] = sum_of(q, width);
    for (int64_t d = 0; d < width; d += 16) {
      uint8_t* row = query_tile(t, r / 16, d / 32) + r % 16 * 64 + d % 32 * 2;
      Simd::store_bf16(row, Simd::load(q + d));
    }
  }
  for (int64_t k = 0; t.narrow && k < t.width; ++k) {
    transpose_tile(query_tile(t, 0, k), query_tile(t, 0, k));
  }
}

/// 32 dims of the scores of a row tile and all keys of the block; the last step stores them.
inline void score_step(
    const TileTask& t, int64_t block, int64_t row_tile, int64_t k, uint8_t* scores) {
  static_assert(kKeyGroups == 4);
  if (k == 0) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }
  load_tile<4>(query_tile(t, row_tile, k));
  load_tile<5>(key_tile(t.block, kKeyGroups * block, k));
  load_tile<6>(key_tile(t.block, kKeyGroups * block + 1, k));
  dot_bf16<0, 4, 5>();
  dot_bf16<1, 4, 6>();
  load_tile<7>(key_tile(t.block, kKeyGroups * block + 2, k));
  load_tile<5>(key_tile(t.block, kKeyGroups * block + 3, k));
  dot_bf16<2, 4, 7>();
  dot_bf16<3, 4, 5>();
  if (k == t.width - 1) {
    store_tile<0>(scores);
    store_tile<1>(scores + kTileBytes);
    store_tile<2>(scores + 2 * kTileBytes);
    store_tile<3>(scores + 3 * kTileBytes);
  }
}

/// Up to 64 dims of the sums of a row tile, from tile d on, in tiles 0 to 3.
inline void load_acc(const TileTask& t, int64_t row_tile, int64_t d) {
  load_tile<0>(acc_tile(t, row_tile, d));
  load_tile<1>(acc_tile(t, row_tile, d + 1));
  if (d + 2 < 2 * t.width) {
    load_tile<2>(acc_tile(t, row_tile, d + 2));
    load_tile<3>(acc_tile(t, row_tile, d + 3));
  }
}

inline void store_acc(const TileTask& t, int64_t row_tile, int64_t d) {
  store_tile<0>(acc_tile(t, row_tile, d));
  store_tile<1>(acc_tile(t, row_tile, d + 1));
  if (d + 2 < 2 * t.width) {
    store_tile<2>(acc_tile(t, row_tile, d + 2));
    store_tile<3>(acc_tile(t, row_tile, d + 3));
  }
}

/// acc += weights · values of a row tile for 64 dims (`d` counts tiles of 16) and 32 keys.
inline void add_step(const TileTask& t,
                     int64_t row_tile,
                     int64_t d,
                     int64_t j,
                     const TileRange& range,
                     const uint8_t* weights) {
  if (32 * j == range.begin) {
    load_acc(t, row_tile, d);
  }
  load_tile<4>(weights + j * kTileBytes);
  load_tile<5>(value_tile(t.block, 2 * range.block + j, d));
  dot_bf16<0, 4, 5>();
  load_tile<6>(value_tile(t.block, 2 * range.block + j, d + 1));
  dot_bf16<1, 4, 6>();
  if (d + 2 < 2 * t.width) {
    load_tile<7>(value_tile(t.block, 2 * range.block + j, d + 2));
    dot_bf16<2, 4, 7>();
    load_tile<5>(value_tile(t.block, 2 * range.block + j, d + 3));
    dot_bf16<3, 4, 5>();
  }
  if (32 * (j + 1) == range.end) {
    store_acc(t, row_tile, d);
  }
}

/// acc += weights · values of a row tile.
inline void add_values_of(const TileTask& t,
                          int64_t row_tile,
                          const TileRange& range,
                          const uint8_t* weights) {
  for (int64_t d = 0; d < 2 * t.width; d += 4) {
    for (int64_t j = range.begin / 32; j < range.end / 32; ++j) {
      add_step(t, row_tile, d, j, range, weights);
    }
  }
}

/// The keys that a row tile sees of `keys` (within the block at `at`).
inline TileRange range_of(const AttentionTask& task,
                          const TileTask& t,
                          int64_t block,
                          int64_t at,
                          const int64_t (&keys)[2],
                          int64_t row_tile) {
  const int64_t oldest = t.positions[row_tile * 16];
  const int64_t newest = t.positions[smaller(t.rows, row_tile * 16 + 16) - 1];
  const int64_t begin = larger(keys[0], first_visible(task, oldest) - at);
  const int64_t end = smaller(keys[1], newest + 1 - at);
  TileRange range{static_cast<int32_t>(block),           static_cast<int32_t>(at),
                  static_cast<int32_t>(begin / 32 * 32), static_cast<int32_t>(round_up(end, 32)),
                  static_cast<int32_t>(keys[0]),         false};
  range.masked = larger(keys[0], first_visible(task, newest) - at) > 0 ||
                 smaller(keys[1], oldest + 1 - at) < kKeyBlock;
  if (begin >= end) {
    range.end = range.begin;
  }
  return range;
}

}  // namespace
}  // namespace nibble::cpu
