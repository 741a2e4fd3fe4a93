#pragma once

// Steps of attention in tiles: scores of a row tile of 16 query rows and a block of keys, their
// weights, and the weighted sums of values.

#include "backend/cpu/amx/amx_attention_pack.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kKeyGroups = kKeyBlock / 16;                 // tiles of scores of a row tile
constexpr int64_t kWeightBytes = kKeyBlock / 32 * kTileBytes;  // weights of a row tile

/// What a task works on; tiles are 1024 bytes each.
struct TileTask {
  int64_t rows = 0;     // tokens * group
  int64_t width = 0;    // head_dim in blocks of 32
  bool narrow = false;  // up to 16 rows
  uint8_t* queries;     // [row tile][width] rows of 32 dims; narrow: transposed
  float* q_sum;         // [rows, padded to 16]
  float* sums;          // [row][16] weights by lane
  float* offsets;       // [row][16]
  float* top;           // [row]
  int32_t* positions;   // [row], -1 for rows that are not there
  uint8_t* acc;         // [row tile][2 width] of 16 dims
  // Of two row tiles in turn, so that tiles are not loaded right after they were stored.
  uint8_t* scores[2];   // [kKeyGroups]
  uint8_t* weights[2];  // [kKeyBlock / 32]
  TileBlock block;
};

/// The keys of one block that some row of a row tile sees.
struct TileRange {
  int64_t at;     // position of the block
  int64_t begin;  // within the block, multiples of 32
  int64_t end;
  int64_t first;  // of the block's keys that count
  bool masked;    // not all rows see the whole block
};

inline uint8_t* query_tile(const TileTask& t, int64_t row_tile, int64_t k) {
  return t.queries + (row_tile * t.width + k) * kTileBytes;
}

inline uint8_t* acc_tile(const TileTask& t, int64_t row_tile, int64_t d) {
  return t.acc + (row_tile * 2 * t.width + d) * kTileBytes;
}

inline void load_query_tiles(const AttentionTask& task, const TileTask& t) {
  const int64_t dim = task.kv.head_dim;
  for (int64_t r = 0; r < round_up(t.rows, 16); ++r) {
    const bool exists = r < t.rows;
    const int64_t source = r / task.group * task.q_stride + r % task.group * dim;
    t.positions[r] = exists ? static_cast<int32_t>(task.first_position + r / task.group) : -1;
    F32x16 sum = Simd::set(0.0F);
    for (int64_t d = 0; d < 32 * t.width; d += 16) {
      const int64_t lanes = exists ? larger(0, smaller(16, dim - d)) : 0;
      const F32x16 q =
          lanes > 0 ? nearest_bf16(load_numbers(task.q, source + d, lanes)) : Simd::set(0.0F);
      sum = Simd::add(sum, q);
      uint8_t* row = query_tile(t, r / 16, d / 32) + r % 16 * 64 + d % 32 * 2;
      Simd::store_bf16(row, q);
    }
    t.q_sum[r] = Simd::reduce_add(sum);
  }
  for (int64_t k = 0; t.narrow && k < t.width; ++k) {
    transpose_tile(query_tile(t, 0, k), query_tile(t, 0, k));
  }
}

/// 32 dims of the scores of a row tile and all keys of the block; the last step stores them.
template <bool kNarrow>
void score_step(
    const TileTask& t, const TileBlock& block, int64_t row_tile, int64_t k, uint8_t* scores) {
  static_assert(kKeyGroups == 4);
  if (k == 0) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }
  load_tile<4>(query_tile(t, row_tile, k));
  load_tile<5>(key_tile(block, 0, k));
  load_tile<6>(key_tile(block, 1, k));
  if constexpr (kNarrow) {
    dot_bf16<0, 5, 4>();
    dot_bf16<1, 6, 4>();
  } else {
    dot_bf16<0, 4, 5>();
    dot_bf16<1, 4, 6>();
  }
  load_tile<7>(key_tile(block, 2, k));
  load_tile<5>(key_tile(block, 3, k));
  if constexpr (kNarrow) {
    dot_bf16<2, 7, 4>();
    dot_bf16<3, 5, 4>();
  } else {
    dot_bf16<2, 4, 7>();
    dot_bf16<3, 4, 5>();
  }
  if (k == t.width - 1) {
    store_tile<0>(scores);
    store_tile<1>(scores + kTileBytes);
    store_tile<2>(scores + 2 * kTileBytes);
    store_tile<3>(scores + 3 * kTileBytes);
  }
}

/// acc += weights · values of a row tile for 64 dims (`d` counts tiles of 16) and 32 keys.
inline void add_step(const TileTask& t,
                     const TileBlock& block,
                     int64_t row_tile,
                     int64_t d,
                     int64_t j,
                     const TileRange& range,
                     const uint8_t* weights) {
  const bool wide = d + 2 < 2 * t.width;
  if (32 * j == range.begin) {
    load_tile<0>(acc_tile(t, row_tile, d));
    load_tile<1>(acc_tile(t, row_tile, d + 1));
    if (wide) {
      load_tile<2>(acc_tile(t, row_tile, d + 2));
      load_tile<3>(acc_tile(t, row_tile, d + 3));
    }
  }
  load_tile<4>(weights + j * kTileBytes);
  load_tile<5>(value_tile(block, j, d));
  dot_bf16<0, 4, 5>();
  load_tile<6>(value_tile(block, j, d + 1));
  dot_bf16<1, 4, 6>();
  if (wide) {
    load_tile<7>(value_tile(block, j, d + 2));
    dot_bf16<2, 4, 7>();
    load_tile<5>(value_tile(block, j, d + 3));
    dot_bf16<3, 4, 5>();
  }
  if (32 * (j + 1) == range.end) {
    store_tile<0>(acc_tile(t, row_tile, d));
    store_tile<1>(acc_tile(t, row_tile, d + 1));
    if (wide) {
      store_tile<2>(acc_tile(t, row_tile, d + 2));
      store_tile<3>(acc_tile(t, row_tile, d + 3));
    }
  }
}

/// acc += weights · values of a row tile.
inline void add_values_of(const TileTask& t,
                          const TileBlock& block,
                          int64_t row_tile,
                          const TileRange& range,
                          const uint8_t* weights) {
  for (int64_t d = 0; d < 2 * t.width; d += 4) {
    for (int64_t j = range.begin / 32; j < range.end / 32; ++j) {
      add_step(t, block, row_tile, d, j, range, weights);
    }
  }
}

/// One query row and the keys of a block.
struct TileRow {
  int64_t row;
  uint64_t seen;        // bit j: the row sees key j
  const float* scores;  // 256 apart per key group

  [[nodiscard]] __mmask16 seen_of(int64_t g) const {
    return static_cast<__mmask16>(seen >> (16 * g));
  }
};

/// Bits first .. last-1 of those that exist.
inline uint64_t bits_between(int64_t first, int64_t last) {
  static_assert(kKeyBlock == 64);
  first = larger(first, 0);
  last = smaller(last, kKeyBlock);
  return first < last ? ~uint64_t{0} >> (64 - (last - first)) << first : 0;
}

template <int kCode>
F32x16 scaled_group(const TileBlock& block, const TileRow& r, int64_t g, F32x16 q_sum, F32x16 add) {
  if constexpr (kCode == 3) {
    add = Simd::fma(Simd::load(block.score_offset + 16 * g), q_sum, add);
  }
  return Simd::fma(Simd::load(r.scores + 256 * g), Simd::load(block.score_scale + 16 * g), add);
}

/// Makes the largest score the row's top and rescales its sums.
template <int kCode>
[[gnu::noinline]] void raise_top(const TileTask& t, const TileBlock& block, const TileRow& r) {
  F32x16 largest = Simd::set(kLowest);
  const F32x16 q_sum = Simd::set(t.q_sum[r.row]);
  for (int64_t g = 0; g < kKeyGroups; ++g) {
    const F32x16 score = scaled_group<kCode>(block, r, g, q_sum, Simd::set(0.0F));
    largest.v = _mm512_mask_max_ps(largest.v, r.seen_of(g), score.v, largest.v);
  }
  const float top = Simd::reduce_max(largest);
  const F32x16 factor = Simd::set(exp2_weight(t.top[r.row] - top));
  t.top[r.row] = top;
  float* sums = t.sums + r.row * 16;
  float* offsets = t.offsets + r.row * 16;
  Simd::store(sums, Simd::mul(Simd::load(sums), factor));
  Simd::store(offsets, Simd::mul(Simd::load(offsets), factor));
  for (int64_t d = 0; d < 2 * t.width; ++d) {
    auto* acc = reinterpret_cast<float*>(acc_tile(t, r.row / 16, d) + r.row % 16 * 64);
    Simd::store(acc, Simd::mul(Simd::load(acc), factor));
  }
}

/// Exponents of a row's weights, -inf for keys that it does not see; true when its top must rise.
template <int kCode, bool kFull>
[[gnu::always_inline]] inline bool exponents_of(const TileTask& t,
                                                const TileBlock& block,
                                                const TileRow& r,
                                                F32x16 (&exponents)[kKeyGroups]) {
  const F32x16 q_sum = Simd::set(t.q_sum[r.row]);
  const F32x16 minus_top = Simd::set(-t.top[r.row]);
  F32x16 largest = Simd::set(kLowest);
#pragma GCC unroll 4
  for (int64_t g = 0; g < kKeyGroups; ++g) {
    F32x16 x = scaled_group<kCode>(block, r, g, q_sum, minus_top);
    if constexpr (!kFull) {
      x.v = _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), r.seen_of(g), x.v);
    }
    exponents[g] = x;
    largest = Simd::max(x, largest);
  }
  return _mm512_cmp_ps_mask(largest.v, _mm512_set1_ps(kTopSlack), _CMP_GT_OQ) != 0;
}

/// Scores of a row become weights in BF16; their sums are kept. kFull: it sees the whole block.
template <int kCode, bool kFull>
[[gnu::always_inline]] inline void weigh_row(const TileTask& t,
                                             const TileBlock& block,
                                             const TileRow& r,
                                             uint8_t* weights) {
  F32x16 exponents[kKeyGroups];
  if (__builtin_expect(exponents_of<kCode, kFull>(t, block, r, exponents), 0) != 0) {
    raise_top<kCode>(t, block, r);
    exponents_of<kCode, kFull>(t, block, r, exponents);
  }
  F32x16 sum = Simd::load(t.sums + r.row * 16);
  F32x16 offset = Simd::load(t.offsets + r.row * 16);
#pragma GCC unroll 2
  for (int64_t g = 0; g < kKeyGroups; g += 2) {
    F32x16 weight[2];
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; ++i) {
      weight[i] = exp2_weight(exponents[g + i]);
      if constexpr (!kFull) {
        weight[i].v = _mm512_maskz_mov_ps(r.seen_of(g + i), weight[i].v);
      }
      sum = Simd::add(sum, weight[i]);
      if constexpr (kCode == 3) {
        const F32x16 value_offset = Simd::load(block.value_offset + 16 * (g + i));
        offset = kFull ? Simd::fma(weight[i], value_offset, offset)
                       : F32x16{_mm512_mask3_fmadd_ps(weight[i].v, value_offset.v, offset.v,
                                                      r.seen_of(g + i))};
      }
      if constexpr (kCode != 1) {
        const F32x16 value_scale = Simd::load(block.value_scale + 16 * (g + i));
        weight[i] = kFull
                        ? Simd::mul(weight[i], value_scale)
                        : F32x16{_mm512_maskz_mul_ps(r.seen_of(g + i), weight[i].v, value_scale.v)};
      }
    }
    const auto pair = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[1].v, weight[0].v));
    _mm512_storeu_si512(weights + g / 2 * kTileBytes, pair);
  }
  Simd::store(t.sums + r.row * 16, sum);
  if constexpr (kCode == 3) {
    Simd::store(t.offsets + r.row * 16, offset);
  }
}

/// The rows of a row tile.
template <int kCode>
void weigh_rows(const AttentionTask& task,
                const TileTask& t,
                const TileBlock& block,
                const TileRange& range,
                int64_t row_tile,
                int64_t buffer) {
  const int64_t last = smaller(row_tile * 16 + 16, t.rows);
  for (int64_t row = row_tile * 16; row < last; ++row) {
    const uint8_t* scores = t.scores[buffer] + row % 16 * 64;
    uint8_t* weights = t.weights[buffer] + row % 16 * 64;
    TileRow r{row, ~uint64_t{0}, reinterpret_cast<const float*>(scores)};
    if (!range.masked) {
      weigh_row<kCode, true>(t, block, r, weights);
    } else {
      const int64_t first = first_visible(task, t.positions[row]) - range.at;
      r.seen = bits_between(larger(first, range.first), t.positions[row] + 1 - range.at);
      weigh_row<kCode, false>(t, block, r, weights);
    }
  }
}

/// The keys that a row tile sees of `keys` (within the block at `at`).
inline TileRange range_of(const AttentionTask& task,
                          const TileTask& t,
                          int64_t at,
                          const int64_t (&keys)[2],
                          int64_t row_tile) {
  const int64_t oldest = t.positions[row_tile * 16];
  const int64_t newest = t.positions[smaller(t.rows, row_tile * 16 + 16) - 1];
  const int64_t begin = larger(keys[0], first_visible(task, oldest) - at);
  const int64_t end = smaller(keys[1], newest + 1 - at);
  TileRange range{at, begin / 32 * 32, round_up(end, 32), keys[0], false};
  range.masked = larger(keys[0], first_visible(task, newest) - at) > 0 ||
                 smaller(keys[1], oldest + 1 - at) < kKeyBlock;
  if (begin >= end) {
    range.end = range.begin;
  }
  return range;
}

}  // namespace
}  // namespace nibble::cpu
