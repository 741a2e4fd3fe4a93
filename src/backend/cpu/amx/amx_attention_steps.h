#pragma once

// Steps of attention in tiles: scores of a row tile of 16 query rows and a block of keys, their
// weights, and the weighted sums of values.

#include "backend/cpu/amx/amx_attention_pack.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kKeyGroups = kKeyBlock / 16;  // tiles of scores of a row tile

/// What is kept of 16 query rows.
struct alignas(64) RowTile {
  float sums[16][16];     // weights by lane
  float shift[16];        // ExponentRange::kBase - top
  float unit[16];         // INT8 and INT4: of the row's codes
  int32_t positions[16];  // -1 for rows that are not there
};

/// What a task works on; tiles are 1024 bytes each.
struct TileTask {
  int64_t rows = 0;     // tokens * group
  int64_t width = 0;    // head_dim in blocks of 32
  bool narrow = false;  // up to 16 rows
  uint8_t* queries;     // [row tile][key_width] rows of 64 bytes; narrow: transposed
  RowTile* row_tiles;
  uint8_t* acc;  // [row tile][2 width] of 16 dims
  // Of two steps in turn; the rows of weights take the place of those of the last scores.
  uint8_t* scores[2];  // [kKeyGroups]
  TileBlock block;
  uint8_t* copies;  // of keys that do not lie in one page, see find_block
};

/// The keys of one block that some row of a row tile sees.
struct TileRange {
  int32_t at;     // position of the block
  uint8_t block;  // of the chunk
  uint8_t begin;  // within the block, multiples of 32
  uint8_t end;
  uint8_t first;  // of the block's keys that count
  bool masked;    // not all rows see the whole block
};
static_assert(kKeyBlock < 256);

/// Where the weights of `scores` lie: two tiles of 32 keys each.
inline uint8_t* weights_at(uint8_t* scores) { return scores + 2 * kTileBytes; }

inline uint8_t* query_tile(const TileTask& t, int64_t row_tile, int64_t k) {
  return t.queries + (row_tile * t.block.key_width + k) * kTileBytes;
}

inline uint8_t* acc_tile(const TileTask& t, int64_t row_tile, int64_t d) {
  return t.acc + (row_tile * 2 * t.width + d) * kTileBytes;
}

template <int kCode>
void load_query_row(const AttentionTask& task, const TileTask& t, int64_t r) {
  uint8_t* row = query_tile(t, r / 16, 0) + r % 16 * 64;
  if constexpr (kCode == 1) {
    float q[kMaxHeadDim];
    load_query(task, r, 32 * t.width, q);
    for (int64_t d = 0; d < 32 * t.width; d += 16) {
      Simd::store_bf16(row + d / 32 * kTileBytes + d % 32 * 2, Simd::load(q + d));
    }
  } else {
    const QueryCodes query(task, r);
    for (int64_t d = 0; d < task.kv.head_dim; d += 16) {
      Simd::store_u8(row + d / 64 * kTileBytes + d % 64, Simd::load_int(query.codes + d));
    }
    t.row_tiles[r / 16].unit[r % 16] = query.unit;
  }
}

template <int kCode>
void load_query_tiles(const AttentionTask& task, const TileTask& t) {
  const int64_t rows = round_up(t.rows, 16);
  const int64_t tiles = rows / 16 * t.block.key_width;
  __builtin_memset(t.queries, 0, static_cast<size_t>(tiles * kTileBytes));
  __builtin_memset(t.row_tiles, 0, static_cast<size_t>(rows / 16) * sizeof(RowTile));
  for (int64_t r = 0; r < rows; ++r) {
    t.row_tiles[r / 16].positions[r % 16] =
        r < t.rows ? static_cast<int32_t>(task.first_position + r / task.group) : -1;
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    load_query_row<kCode>(task, t, r);
  }
  for (int64_t k = 0; t.narrow && k < t.block.key_width; ++k) {
    transpose_tile(query_tile(t, 0, k), query_tile(t, 0, k));
  }
}

/// Tile kC += the products of queries and keys: BF16 numbers or codes.
template <int kCode, int kC, int kA, int kB>
[[gnu::always_inline]] inline void dot_scores() {
  if constexpr (kCode == 1) {
    dot_bf16<kC, kA, kB>();
  } else {
    dot_s8s8<kC, kA, kB>();
  }
}

/// 64 bytes of the scores of a row tile and all keys of the block; the last step stores them.
template <int kCode>
void score_step(const TileTask& t, int64_t block, int64_t row_tile, int64_t k, uint8_t* scores) {
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
  dot_scores<kCode, 0, 4, 5>();
  dot_scores<kCode, 1, 4, 6>();
  load_tile<7>(key_tile(t.block, kKeyGroups * block + 2, k));
  load_tile<5>(key_tile(t.block, kKeyGroups * block + 3, k));
  dot_scores<kCode, 2, 4, 7>();
  dot_scores<kCode, 3, 4, 5>();
  if (k == t.block.key_width - 1) {
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
  const int32_t* positions = t.row_tiles[row_tile].positions;
  const int64_t oldest = positions[0];
  const int64_t newest = positions[smaller(t.rows - row_tile * 16, 16) - 1];
  const int64_t begin = larger(keys[0], first_visible(task, oldest) - at);
  const int64_t end = smaller(keys[1], newest + 1 - at);
  TileRange range{static_cast<int32_t>(at),
                  static_cast<uint8_t>(block),
                  0,
                  0,
                  static_cast<uint8_t>(keys[0]),
                  false};
  if (begin < end) {
    range.begin = static_cast<uint8_t>(begin / 32 * 32);
    range.end = static_cast<uint8_t>(round_up(end, 32));
  }
  range.masked = larger(keys[0], first_visible(task, newest) - at) > 0 ||
                 smaller(keys[1], oldest + 1 - at) < kKeyBlock;
  return range;
}

}  // namespace
}  // namespace nibble::cpu
