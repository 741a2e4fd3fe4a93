#pragma once

// Attention over BF16, INT8 and INT4 caches in AMX tiles, with the bits of
// kernels/attention_kernels.h. A tile product is just the sum over 32 elements described there.
// Many query rows: scores = Q·Kᵀ, keys transposed once per block for all rows of the task. Up to 16
// rows, as in decoding: scoresᵀ = K·Qᵀ takes the keys as they lie, and the scores are transposed.

#include "backend/cpu/amx/amx_attention_pack.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kPairRows = 32;  // query rows of one step: two tiles

/// What a task works on; tiles are 1024 bytes each.
struct TileTask {
  int64_t rows = 0;     // tokens * group
  int64_t width = 0;    // head_dim in blocks of 32
  bool narrow = false;  // up to 16 rows
  uint8_t* queries;     // [row tile][width] rows of 32 dims; narrow: transposed
  float* q_sum;         // [rows, padded to 32]
  float* sums;          // [row][16] weights by lane
  float* offsets;       // [row][16]
  float* top;           // [row]
  int32_t* positions;   // [row], -1 for rows that are not there
  uint8_t* acc;         // [row tile][2 width] of 16 dims
  uint8_t* scores;      // [2][key group of 16]
  uint8_t* weights;     // [2][kKeyBlock / 32]
  TileBlock block;
};

/// The keys of one block that some row of a row tile sees.
struct TileRange {
  int64_t at;     // position of the block
  int64_t begin;  // within the block, multiples of 32
  int64_t end;
  bool masked;  // not all rows see all of them
};

inline uint8_t* query_tile(const TileTask& t, int64_t row_tile, int64_t k) {
  return t.queries + (row_tile * t.width + k) * kTileBytes;
}

inline uint8_t* acc_tile(const TileTask& t, int64_t row_tile, int64_t d) {
  return t.acc + (row_tile * 2 * t.width + d) * kTileBytes;
}

inline void load_query_tiles(const AttentionTask& task, const TileTask& t) {
  const int64_t dim = task.kv.head_dim;
  for (int64_t r = 0; r < round_up(t.rows, t.narrow ? 16 : kPairRows); ++r) {
    const bool exists = r < t.rows;
    const float* source =
        exists ? task.q + r / task.group * task.q_stride + r % task.group * dim : nullptr;
    t.positions[r] = exists ? static_cast<int32_t>(task.first_position + r / task.group) : -1;
    F32x16 sum = Simd::set(0.0F);
    for (int64_t d = 0; d < 32 * t.width; d += 16) {
      const int64_t lanes = exists ? larger(0, smaller(16, dim - d)) : 0;
      const F32x16 q = lanes > 0 ? nearest_bf16(load_lanes(source + d, lanes)) : Simd::set(0.0F);
      sum = Simd::add(sum, q);
      uint8_t* row = query_tile(t, r / 16, d / 32) + r % 16 * 64 + d % 32 * 2;
      Simd::store_u16(row, Simd::shift_right<16>(Simd::bits(q)));
    }
    t.q_sum[r] = Simd::reduce_add(sum);
  }
  for (int64_t k = 0; t.narrow && k < t.width; ++k) {
    transpose_tile(query_tile(t, 0, k), query_tile(t, 0, k));
  }
}

/// Scores of two row tiles and the keys of a block.
inline void score_pair(const TileTask& t, int64_t row_tile, const TileRange& range) {
  for (int64_t g = range.begin / 16; g < range.end / 16; g += 2) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (int64_t k = 0; k < t.width; ++k) {
      load_tile<4>(query_tile(t, row_tile, k));
      load_tile<6>(key_tile(t.block, g, k));
      dot_bf16<0, 4, 6>();
      load_tile<7>(key_tile(t.block, g + 1, k));
      dot_bf16<1, 4, 7>();
      load_tile<5>(query_tile(t, row_tile + 1, k));
      dot_bf16<2, 5, 6>();
      dot_bf16<3, 5, 7>();
    }
    uint8_t* scores = t.scores + g * kTileBytes;
    store_tile<0>(scores);
    store_tile<1>(scores + kTileBytes);
    store_tile<2>(scores + kKeyBlock / 16 * kTileBytes);
    store_tile<3>(scores + (kKeyBlock / 16 + 1) * kTileBytes);
  }
}

/// Scores of the only row tile and the keys of a block.
inline void score_narrow(const TileTask& t, const TileRange& range) {
  for (int64_t g = range.begin / 16; g < range.end / 16; g += 2) {
    zero_tile<0>();
    zero_tile<1>();
    for (int64_t k = 0; k < t.width; ++k) {
      load_tile<6>(query_tile(t, 0, k));
      load_tile<4>(key_tile(t.block, g, k));
      dot_bf16<0, 4, 6>();
      load_tile<5>(key_tile(t.block, g + 1, k));
      dot_bf16<1, 5, 6>();
    }
    uint8_t* scores = t.scores + g * kTileBytes;
    store_tile<0>(scores);
    store_tile<1>(scores + kTileBytes);
  }
  for (int64_t g = range.begin / 16; g < range.end / 16; ++g) {
    transpose_tile(t.scores + g * kTileBytes, t.scores + g * kTileBytes);
  }
}

/// acc += weights · values for two row tiles.
inline void add_pair(const TileTask& t, int64_t row_tile, const TileRange& range) {
  for (int64_t d = 0; d < 2 * t.width; d += 2) {
    load_tile<0>(acc_tile(t, row_tile, d));
    load_tile<1>(acc_tile(t, row_tile, d + 1));
    load_tile<2>(acc_tile(t, row_tile + 1, d));
    load_tile<3>(acc_tile(t, row_tile + 1, d + 1));
    for (int64_t k = range.begin / 32; k < range.end / 32; ++k) {
      load_tile<4>(t.weights + k * kTileBytes);
      load_tile<6>(value_tile(t.block, k, d));
      dot_bf16<0, 4, 6>();
      load_tile<7>(value_tile(t.block, k, d + 1));
      dot_bf16<1, 4, 7>();
      load_tile<5>(t.weights + (kKeyBlock / 32 + k) * kTileBytes);
      dot_bf16<2, 5, 6>();
      dot_bf16<3, 5, 7>();
    }
    store_tile<0>(acc_tile(t, row_tile, d));
    store_tile<1>(acc_tile(t, row_tile, d + 1));
    store_tile<2>(acc_tile(t, row_tile + 1, d));
    store_tile<3>(acc_tile(t, row_tile + 1, d + 1));
  }
}

inline void add_narrow(const TileTask& t, const TileRange& range) {
  for (int64_t d = 0; d < 2 * t.width; d += 2) {
    load_tile<0>(acc_tile(t, 0, d));
    load_tile<1>(acc_tile(t, 0, d + 1));
    for (int64_t k = range.begin / 32; k < range.end / 32; ++k) {
      load_tile<4>(t.weights + k * kTileBytes);
      load_tile<6>(value_tile(t.block, k, d));
      dot_bf16<0, 4, 6>();
      load_tile<7>(value_tile(t.block, k, d + 1));
      dot_bf16<1, 4, 7>();
    }
    store_tile<0>(acc_tile(t, 0, d));
    store_tile<1>(acc_tile(t, 0, d + 1));
  }
}

/// Lanes of keys 16 g .. 16 g + 15 of a block that lie in first .. last-1.
inline __mmask16 lanes_between(int64_t g, int64_t first, int64_t last) {
  const int64_t low = larger(0, smaller(16, first - 16 * g));
  const int64_t high = larger(0, smaller(16, last - 16 * g));
  return static_cast<__mmask16>((1U << high) - 1U) & static_cast<__mmask16>(~((1U << low) - 1U));
}

/// Scales the scores of a row tile in place; returns the largest of each row that is not NaN.
template <int kCode>
__m512 scale_scores(const AttentionTask& task,
                    const TileTask& t,
                    int64_t row_tile,
                    const TileRange& range,
                    uint8_t* tiles) {
  F32x16 largest[16];
  const int64_t count = smaller(16, t.rows - row_tile * 16);
  for (int64_t r = 0; r < 16; ++r) {
    largest[r] = Simd::set(kLowest);
  }
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = row_tile * 16 + r;
    auto* scores = reinterpret_cast<float*>(tiles + r * 64);
    const F32x16 q_sum = Simd::set(t.q_sum[row]);
    const int64_t position = t.positions[row];
    const int64_t first = first_visible(task, position) - range.at;
    __m512 top = largest[r].v;
    for (int64_t g = range.begin / 16; g < range.end / 16; ++g) {
      const F32x16 scale = Simd::load(t.block.score_scale + 16 * g);
      F32x16 score = Simd::load(scores + g * 256);
      if constexpr (kCode == 3) {
        const F32x16 offset = Simd::mul(Simd::load(t.block.score_offset + 16 * g), q_sum);
        score = Simd::fma(score, scale, offset);
      } else {
        score = Simd::mul(score, scale);
      }
      if (range.masked) {
        const __mmask16 seen = lanes_between(g, first, position + 1 - range.at);
        score.v = _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), seen, score.v);
      }
      Simd::store(scores + g * 256, score);
      top = _mm512_max_ps(score.v, top);
    }
    largest[r].v = top;
  }
  Simd::transpose(largest);
  F32x16 all = largest[0];
  for (int i = 1; i < 16; ++i) {
    all = Simd::max(largest[i], all);
  }
  return all.v;
}

/// Raises the tops of rows that have a score far above theirs, and rescales their sums.
inline void raise_tops(const TileTask& t, int64_t row_tile, __m512 largest) {
  float* tops = t.top + row_tile * 16;
  const __m512 old = _mm512_loadu_ps(tops);
  const __m512 bound = _mm512_add_ps(old, _mm512_set1_ps(kTopSlack));
  const __mmask16 raised = _mm512_cmp_ps_mask(largest, bound, _CMP_GT_OQ);
  if (raised == 0) {
    return;
  }
  const __m512 top = _mm512_mask_mov_ps(old, raised, largest);
  _mm512_storeu_ps(tops, top);
  float factors[16];
  Simd::store(factors, exp2_weight(F32x16{_mm512_sub_ps(old, top)}));
  for (int64_t r = 0; r < 16; ++r) {
    if ((raised >> r & 1) == 0) {
      continue;
    }
    const F32x16 factor = Simd::set(factors[r]);
    float* sums = t.sums + (row_tile * 16 + r) * 16;
    float* offsets = t.offsets + (row_tile * 16 + r) * 16;
    Simd::store(sums, Simd::mul(Simd::load(sums), factor));
    Simd::store(offsets, Simd::mul(Simd::load(offsets), factor));
    for (int64_t d = 0; d < 2 * t.width; ++d) {
      auto* acc = reinterpret_cast<float*>(acc_tile(t, row_tile, d) + r * 64);
      Simd::store(acc, Simd::mul(Simd::load(acc), factor));
    }
  }
}

/// Scores of a row tile become weights in BF16; their sums are kept.
template <int kCode>
void weigh(const TileTask& t,
           int64_t row_tile,
           const TileRange& range,
           const uint8_t* tiles,
           uint8_t* weights) {
  const int64_t count = smaller(16, t.rows - row_tile * 16);
  for (int64_t r = 0; r < count; ++r) {
    const int64_t row = row_tile * 16 + r;
    const auto* scores = reinterpret_cast<const float*>(tiles + r * 64);
    const F32x16 top = Simd::set(t.top[row]);
    F32x16 sum = Simd::load(t.sums + row * 16);
    F32x16 offset = Simd::load(t.offsets + row * 16);
    for (int64_t g = range.begin / 16; g < range.end / 16; g += 2) {
      F32x16 weight[2];
      for (int64_t i = 0; i < 2; ++i) {
        weight[i] = tile_weight(Simd::sub(Simd::load(scores + (g + i) * 256), top));
        sum = Simd::add(sum, weight[i]);
        if constexpr (kCode == 3) {
          offset = Simd::fma(weight[i], Simd::load(t.block.value_offset + 16 * (g + i)), offset);
        }
        if constexpr (kCode != 1) {
          weight[i] = Simd::mul(weight[i], Simd::load(t.block.value_scale + 16 * (g + i)));
        }
      }
      const auto pair = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(weight[1].v, weight[0].v));
      _mm512_storeu_si512(weights + g / 2 * kTileBytes + r * 64, pair);
    }
    Simd::store(t.sums + row * 16, sum);
    if constexpr (kCode == 3) {
      Simd::store(t.offsets + row * 16, offset);
    }
  }
}

/// The keys that row tiles first_tile .. last_tile see of `keys` (within the block at `at`).
inline TileRange range_of(const AttentionTask& task,
                          const TileTask& t,
                          int64_t at,
                          const int64_t (&keys)[2],
                          const int64_t (&row_tiles)[2]) {
  const int64_t oldest = t.positions[row_tiles[0] * 16];
  const int64_t newest = t.positions[smaller(t.rows, row_tiles[1] * 16) - 1];
  const int64_t begin = larger(keys[0], first_visible(task, oldest) - at);
  const int64_t end = smaller(keys[1], newest + 1 - at);
  TileRange range{at, begin / 32 * 32, round_up(end, 32), false};
  range.masked = range.begin < first_visible(task, newest) - at || range.begin < keys[0] ||
                 range.end > smaller(keys[1], oldest + 1 - at);
  if (begin >= end) {
    range.end = range.begin;
  }
  return range;
}

template <int kCode>
void attend_tiles(const AttentionTask& task,
                  const TileTask& t,
                  int64_t at,
                  const int64_t (&keys)[2]) {
  const int64_t step = t.narrow ? 1 : 2;
  for (int64_t row_tile = 0; row_tile * 16 < t.rows; row_tile += step) {
    const TileRange range = range_of(task, t, at, keys, {row_tile, row_tile + step});
    if (range.begin >= range.end) {
      continue;
    }
    if (t.narrow) {
      score_narrow(t, range);
    } else {
      score_pair(t, row_tile, range);
    }
    for (int64_t i = 0; i < step && (row_tile + i) * 16 < t.rows; ++i) {
      uint8_t* scores = t.scores + i * kKeyBlock / 16 * kTileBytes;
      const __m512 largest = scale_scores<kCode>(task, t, row_tile + i, range, scores);
      raise_tops(t, row_tile + i, largest);
      weigh<kCode>(t, row_tile + i, range, scores, t.weights + i * kKeyBlock / 32 * kTileBytes);
    }
    if (t.narrow) {
      add_narrow(t, range);
    } else {
      add_pair(t, row_tile, range);
    }
  }
}

template <int kCode>
void write_states(const AttentionTask& task, const TileTask& t, const RowStates& states) {
  const int64_t padded_dim = round_up(task.kv.head_dim, 16);
  for (int64_t r = 0; r < t.rows; ++r) {
    states.top[r] = t.top[r];
    states.sum[r] = Simd::reduce_add(Simd::load(t.sums + r * 16));
    const F32x16 offset = Simd::set(Simd::reduce_add(Simd::load(t.offsets + r * 16)));
    for (int64_t d = 0; d < padded_dim; d += 16) {
      F32x16 acc = acc_dims<kCode>(acc_tile(t, r / 16, d / 32 * 2) + r % 16 * 64, d % 32 / 16);
      if constexpr (kCode == 3) {
        acc = Simd::add(acc, offset);
      }
      Simd::store(states.acc + r * padded_dim + d, acc);
    }
  }
}

/// Sums over the keys first .. end-1, which lie in one piece.
template <int kCode>
void sum_tiles(const AttentionTask& task,
               const TileTask& t,
               const int64_t (&keys)[2],
               const RowStates& states) {
  const int64_t rows = round_up(t.rows, kPairRows);
  __builtin_memset(t.sums, 0, static_cast<size_t>(rows) * 64);
  __builtin_memset(t.offsets, 0, static_cast<size_t>(rows) * 64);
  __builtin_memset(t.acc, 0, static_cast<size_t>(rows / 16 * 2 * t.width * kTileBytes));
  for (int64_t r = 0; r < rows; ++r) {
    t.top[r] = kLowest;
  }
  for (int64_t at = keys[0] / kKeyBlock * kKeyBlock; at < keys[1]; at += kKeyBlock) {
    const int64_t range[2] = {larger(keys[0], at) - at, smaller(keys[1], at + kKeyBlock) - at};
    pack_block<kCode>(task, at, range, t.narrow, t.block);
    attend_tiles<kCode>(task, t, at, range);
  }
  write_states<kCode>(task, t, states);
}

template <int kCode>
void attention_in_tiles(const AttentionTask& task) {
  TileTask t;
  t.rows = task.tokens * task.group;
  t.width = round_up(task.kv.head_dim, 32) / 32;
  t.narrow = t.rows <= 16;
  const int64_t rows = round_up(t.rows, kPairRows);
  auto* at = reinterpret_cast<uint8_t*>(task.scratch);
  const auto take = [&](int64_t bytes) {
    uint8_t* memory = at;
    at += round_up(bytes, 64);
    return memory;
  };
  const auto take_floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
  t.block.width = t.width;
  t.block.keys = take(kKeyBlock * t.width * 64);
  t.block.values = take(kKeyBlock * t.width * 64);
  t.scores = take(kPairRows * kKeyBlock * 4);
  t.weights = take(kPairRows * kKeyBlock * 2);
  t.block.score_scale = take_floats(kKeyBlock);
  t.block.score_offset = take_floats(kKeyBlock);
  t.block.value_scale = take_floats(kKeyBlock);
  t.block.value_offset = take_floats(kKeyBlock);
  t.queries = take(rows * t.width * 64);
  t.acc = take(rows * t.width * 128);
  t.sums = take_floats(rows * 16);
  t.offsets = take_floats(rows * 16);
  t.q_sum = take_floats(rows);
  t.top = take_floats(rows);
  t.positions = reinterpret_cast<int32_t*>(take(rows * 4));
  load_query_tiles(task, t);
  configure_tiles(16);
  in_pieces(task, reinterpret_cast<float*>(at),
            [&](int64_t first, int64_t end, const RowStates& states) {
              sum_tiles<kCode>(task, t, {first, end}, states);
            });
  release_tiles();
}

void attention_amx(const AttentionTask& task) {
  switch (task.kv.code) {
    case 0:
      return attention_f32(task);
    case 1:
      return attention_in_tiles<1>(task);
    case 2:
      return attention_in_tiles<2>(task);
    default:
      return attention_in_tiles<3>(task);
  }
}

constexpr KernelTable with_tile_attention(KernelTable table) {
  table.attention = attention_amx;
  table.attention_rows = kQueryRows;
  return table;
}

}  // namespace
}  // namespace nibble::cpu
