#pragma once

// Attention over BF16, INT8 and INT4 caches in AMX tiles, with the bits of
// kernels/attention_kernels.h. A tile product is just the sum over 32 elements described there.
// Many query rows: scores = Q·Kᵀ, keys transposed once per block for all rows of the task. Up to 16
// rows, as in decoding: scoresᵀ = K·Qᵀ takes the keys as they lie, and the scores are transposed.

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
  for (int64_t r = 0; r < round_up(t.rows, 16); ++r) {
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

/// Lanes of keys 16 g .. 16 g + 15 of a block that lie in first .. last-1.
inline __mmask16 lanes_between(int64_t g, int64_t first, int64_t last) {
  const int64_t low = larger(0, smaller(16, first - 16 * g));
  const int64_t high = larger(0, smaller(16, last - 16 * g));
  return static_cast<__mmask16>((1U << high) - 1U) & static_cast<__mmask16>(~((1U << low) - 1U));
}

/// One query row and the keys of a block.
struct TileRow {
  int64_t row;
  int64_t group_begin;  // key groups of 16
  int64_t group_end;
  int64_t first;  // keys that it sees: first .. last-1
  int64_t last;
  const float* scores;  // 256 apart per key group
};

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
  for (int64_t g = r.group_begin; g < r.group_end; ++g) {
    const F32x16 q_sum = Simd::set(t.q_sum[r.row]);
    const F32x16 score = scaled_group<kCode>(block, r, g, q_sum, Simd::set(0.0F));
    const __mmask16 seen = lanes_between(g, r.first, r.last);
    largest.v = _mm512_mask_max_ps(largest.v, seen, score.v, largest.v);
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

/// Scores of a row become weights in BF16; their sums are kept. kFull: it sees the whole block.
template <int kCode, bool kFull>
[[gnu::always_inline]] inline void weigh_row(const TileTask& t,
                                             const TileBlock& block,
                                             const TileRow& r,
                                             uint8_t* weights) {
  constexpr int64_t kGroups = kKeyBlock / 16;
  const int64_t begin = kFull ? 0 : r.group_begin;
  const int64_t end = kFull ? kGroups : r.group_end;
  const F32x16 q_sum = Simd::set(t.q_sum[r.row]);
  F32x16 exponents[kGroups];
  const auto scale = [&]() __attribute__((always_inline)) {
    const F32x16 minus_top = Simd::set(-t.top[r.row]);
    F32x16 largest = Simd::set(kLowest);
#pragma GCC unroll 8
    for (int64_t g = begin; g < end; ++g) {
      F32x16 x = scaled_group<kCode>(block, r, g, q_sum, minus_top);
      if constexpr (!kFull) {
        const __m512 unseen = _mm512_set1_ps(-__builtin_inff());
        x.v = _mm512_mask_mov_ps(unseen, lanes_between(g, r.first, r.last), x.v);
      }
      exponents[g] = x;
      largest = Simd::max(x, largest);
    }
    return _mm512_cmp_ps_mask(largest.v, _mm512_set1_ps(kTopSlack), _CMP_GT_OQ) != 0;
  };
  if (__builtin_expect(scale(), 0) != 0) {
    raise_top<kCode>(t, block, r);
    scale();
  }
  F32x16 sum = Simd::load(t.sums + r.row * 16);
  F32x16 offset = Simd::load(t.offsets + r.row * 16);
#pragma GCC unroll 4
  for (int64_t g = begin; g < end; g += 2) {
    F32x16 weight[2];
#pragma GCC unroll 2
    for (int64_t i = 0; i < 2; ++i) {
      weight[i] = exp2_weight(exponents[g + i]);
      if constexpr (!kFull) {
        weight[i].v = _mm512_maskz_mov_ps(lanes_between(g + i, r.first, r.last), weight[i].v);
      }
      sum = Simd::add(sum, weight[i]);
      if constexpr (kCode == 3) {
        offset = Simd::fma(weight[i], Simd::load(block.value_offset + 16 * (g + i)), offset);
      }
      if constexpr (kCode != 1) {
        weight[i] = Simd::mul(weight[i], Simd::load(block.value_scale + 16 * (g + i)));
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

/// Rows first .. last-1 of a row tile.
template <int kCode>
void weigh_rows(const AttentionTask& task,
                const TileTask& t,
                const TileBlock& block,
                const int64_t (&rows)[2],
                const TileRange& range,
                int64_t buffer) {
  const int64_t last = smaller(rows[1], t.rows);
  const auto row_at = [&](int64_t row) {
    const uint8_t* scores = t.scores[buffer] + row % 16 * 64;
    return TileRow{row, range.begin / 16, range.end / 16,
                   0,   kKeyBlock,        reinterpret_cast<const float*>(scores)};
  };
  if (!range.masked && range.end - range.begin == kKeyBlock) {
    for (int64_t row = rows[0]; row < last; ++row) {
      weigh_row<kCode, true>(t, block, row_at(row), t.weights[buffer] + row % 16 * 64);
    }
    return;
  }
  for (int64_t row = rows[0]; row < last; ++row) {
    TileRow r = row_at(row);
    if (range.masked) {
      r.first = first_visible(task, t.positions[row]) - range.at;
      r.last = t.positions[row] + 1 - range.at;
    }
    weigh_row<kCode, false>(t, block, r, t.weights[buffer] + row % 16 * 64);
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
  TileRange range{at, begin / 32 * 32, round_up(end, 32), false};
  range.masked = range.begin < first_visible(task, newest) - at || range.begin < keys[0] ||
                 range.end > smaller(keys[1], oldest + 1 - at);
  if (begin >= end) {
    range.end = range.begin;
  }
  return range;
}

constexpr int64_t kGroupTiles = 4;  // row tiles whose queries and sums stay in the L1 cache

/// One row tile and one block.
struct TileStep {
  int64_t row_tile = 0;
  TileBlock block;
  TileRange range{};
};

/// The order of a chunk's steps: groups of row tiles, in each the blocks, in each the row tiles. A
/// row tile never follows itself: there are two or more, in groups of nearly the same size.
struct TileOrder {
  int64_t tiles;
  int64_t groups;
  int64_t blocks;
  int64_t group = 0;
  int64_t block = 0;
  int64_t tile = 0;

  [[nodiscard]] bool done() const { return group == groups; }
  void advance() {
    if (++tile < (group + 1) * tiles / groups) {
      return;
    }
    if (++block == blocks) {
      block = 0;
      ++group;
    }
    tile = group * tiles / groups;
  }
};

/// Block `index` of a chunk.
inline TileBlock block_of(const TileBlock& chunk, int64_t index) {
  TileBlock block = chunk;
  block.keys += index * kKeyBlock * 64 * chunk.width;
  block.values += index * kKeyBlock * 64 * chunk.width;
  block.score_scale += index * kKeyBlock;
  block.score_offset += index * kKeyBlock;
  block.value_scale += index * kKeyBlock;
  block.value_offset += index * kKeyBlock;
  return block;
}

/// All rows and a packed chunk of blocks. The scores of the next step and the sums of the one
/// before go between the weights of a step, so that tiles are stored well before they are loaded.
template <int kCode>
void attend_chunk(const AttentionTask& task,
                  const TileTask& t,
                  const int64_t (&keys)[2],
                  int64_t first_block) {
  const int64_t tiles = (t.rows + 15) / 16;
  const int64_t blocks = (keys[1] - first_block + kKeyBlock - 1) / kKeyBlock;
  TileOrder order{tiles, (tiles + kGroupTiles - 1) / kGroupTiles, blocks};
  const auto take_step = [&] {
    TileStep step;
    if (!order.done()) {
      step.row_tile = order.tile;
      step.block = block_of(t.block, order.block);
      const PackRange pack = pack_range(keys, first_block + order.block * kKeyBlock);
      step.range = range_of(task, t, pack.at, pack.range, step.row_tile);
      order.advance();
    }
    return step;
  };
  TileStep next = take_step();
  TileStep now;
  TileStep before;
  const int64_t steps = tiles * blocks;
  for (int64_t i = -1; i <= steps; ++i) {
    const int64_t here = i & 1;
    if (next.range.begin < next.range.end) {
      for (int64_t k = 0; k < t.width; ++k) {
        score_step<false>(t, next.block, next.row_tile, k, t.scores[1 - here]);
      }
    }
    const int64_t row = now.row_tile * 16;
    if (now.range.begin < now.range.end) {
      weigh_rows<kCode>(task, t, now.block, {row, row + 16}, now.range, here);
    }
    if (before.range.begin < before.range.end) {
      add_values_of(t, before.block, before.row_tile, before.range, t.weights[1 - here]);
    }
    before = now;
    now = next;
    next = take_step();
  }
}

template <int kCode, bool kWhole>
void sum_wide(const AttentionTask& task, const TileTask& t, const int64_t (&keys)[2]) {
  KvRows rows;
  for (int64_t at = keys[0] / kKeyBlock * kKeyBlock; at < keys[1]; at += kKeyChunk) {
    const int64_t chunk[2] = {larger(keys[0], at), smaller(keys[1], at + kKeyChunk)};
    for (int64_t b = 0; at + b * kKeyBlock < chunk[1]; ++b) {
      const PackRange pack = pack_range(chunk, at + b * kKeyBlock);
      const TileBlock block = block_of(t.block, b);
      prefetch_rows(task, pack.at + kKeyBlock, pack.at + 2 * kKeyBlock, keys[1]);
      find_block(task, pack, rows);
      pack_params<kCode>(task, pack, rows, block);
      pack_keys<kCode, kWhole>(task, pack, rows, false, block);
      pack_values<kCode, kWhole>(task, pack, rows, block);
    }
    attend_chunk<kCode>(task, t, chunk, at);
  }
}

/// The next block's keys are packed between the weights and their products, those of the block
/// after it asked for in four parts between other work.
template <int kCode, bool kWhole>
void sum_narrow(const AttentionTask& task, const TileTask& t, const int64_t (&keys)[2]) {
  KvRows rows;
  const auto begin_block = [&](const PackRange& pack) {
    find_block(task, pack, rows);
    pack_keys<kCode, kWhole>(task, pack, rows, true, t.block);
  };
  const auto prefetch = [&](int64_t at, int64_t part) {
    const int64_t first = at + 2 * kKeyBlock + part * kKeyBlock / 4;
    prefetch_rows(task, first, first + kKeyBlock / 4, keys[1]);
  };
  PackRange pack = pack_range(keys, keys[0] / kKeyBlock * kKeyBlock);
  prefetch_rows(task, pack.at + pack.range[0], pack.at + 2 * kKeyBlock, keys[1]);
  begin_block(pack);
  while (pack.at < keys[1]) {
    const int64_t at = pack.at;
    prefetch(at, 0);
    const TileRange range = range_of(task, t, pack.at, pack.range, 0);
    for (int64_t k = 0; k < t.width; ++k) {
      score_step<true>(t, t.block, 0, k, t.scores[0]);
    }
    pack_params<kCode>(task, pack, rows, t.block);
    prefetch(at, 1);
    pack_values<kCode, kWhole>(task, pack, rows, t.block);
    prefetch(at, 2);
    for (int64_t g = range.begin / 16; g < range.end / 16; ++g) {
      transpose_tile(t.scores[0] + g * kTileBytes, t.scores[0] + g * kTileBytes);
    }
    weigh_rows<kCode>(task, t, t.block, {0, t.rows}, range, 0);
    prefetch(at, 3);
    pack = pack_range(keys, at + kKeyBlock);
    if (pack.at < keys[1]) {
      begin_block(pack);
    }
    add_values_of(t, t.block, 0, range, t.weights[0]);
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
  const int64_t rows = round_up(t.rows, 16);
  __builtin_memset(t.sums, 0, static_cast<size_t>(rows) * 64);
  __builtin_memset(t.offsets, 0, static_cast<size_t>(rows) * 64);
  __builtin_memset(t.acc, 0, static_cast<size_t>(rows / 16 * 2 * t.width * kTileBytes));
  for (int64_t r = 0; r < rows; ++r) {
    t.top[r] = kLowest;
  }
  if (task.kv.head_dim % 32 == 0) {
    t.narrow ? sum_narrow<kCode, true>(task, t, keys) : sum_wide<kCode, true>(task, t, keys);
  } else {
    t.narrow ? sum_narrow<kCode, false>(task, t, keys) : sum_wide<kCode, false>(task, t, keys);
  }
  write_states<kCode>(task, t, states);
}

template <int kCode>
void attention_in_tiles(const AttentionTask& task) {
  TileTask t;
  t.rows = task.tokens * task.group;
  t.width = round_up(task.kv.head_dim, 32) / 32;
  t.narrow = t.rows <= 16;
  const int64_t rows = round_up(t.rows, 16);
  auto* at = reinterpret_cast<uint8_t*>(task.scratch);
  const auto take = [&](int64_t bytes) {
    uint8_t* memory = at;
    at += round_up(bytes, 64);
    return memory;
  };
  const auto take_floats = [&](int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
  t.block.width = t.width;
  const int64_t keys = t.narrow ? kKeyBlock : kKeyChunk;
  t.block.keys = take(keys * t.width * 64);
  t.block.values = take(keys * t.width * 64);
  for (int i = 0; i < 2; ++i) {
    t.scores[i] = take(kKeyGroups * kTileBytes);
    t.weights[i] = take(kWeightBytes);
  }
  t.block.score_scale = take_floats(keys);
  t.block.score_offset = take_floats(keys);
  t.block.value_scale = take_floats(keys);
  t.block.value_offset = take_floats(keys);
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
