#pragma once

// Attention over BF16, INT8 and INT4 caches in AMX tiles, with the bits of
// kernels/attention_kernels.h. A tile product is just the sum over 32 elements described there.
// Many query rows: scores = Q·Kᵀ, keys transposed once per block for all rows of the task. Up to 16
// rows, as in decoding: scoresᵀ = K·Qᵀ takes the keys as they lie, and the scores are transposed.

#include "backend/cpu/amx/amx_attention_mixed.h"
#include "backend/cpu/amx/amx_attention_narrow.h"

namespace nibble::cpu {
namespace {

constexpr int64_t kGroupTiles = 2;  // row tiles that share what the first cache holds of a block

/// The steps of a chunk that see keys, between two empty ones at each end: groups of row tiles, in
/// each the blocks, in each the row tiles. A row tile never follows itself.
class StepList {
 public:
  StepList(const AttentionTask& task,
           const TileTask& t,
           const int64_t (&keys)[2],
           int64_t first_block) {
    steps_[0] = steps_[1] = TileStep{};
    const int64_t tiles = (t.rows + 15) / 16;
    const int64_t groups = (tiles + kGroupTiles - 1) / kGroupTiles;
    const int64_t blocks = (keys[1] - first_block + kKeyBlock - 1) / kKeyBlock;
    TileRange first[kKeyChunk / kKeyBlock];  // of the first row tile
    for (int64_t block = 0; block < blocks; ++block) {
      const PackRange pack = pack_range(keys, first_block + block * kKeyBlock);
      first[block] = range_of(task, t, block, pack.at, pack.range, 0);
    }
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t end = (group + 1) * tiles / groups;
      for (int64_t block = 0; block < blocks; ++block) {
        const TileRange& range = first[block];
        const bool all = !range.masked && task.window == 0;  // later rows see what the first sees
        for (int64_t tile = group * tiles / groups; tile < end; ++tile) {
          if (all) {
            add({tile, range});
            continue;
          }
          const PackRange pack = pack_range(keys, first_block + block * kKeyBlock);
          add({tile, range_of(task, t, block, pack.at, pack.range, tile)});
        }
      }
    }
    steps_[count_] = steps_[count_ + 1] = TileStep{};
  }

  /// Calls step(Steps) of all neighbours.
  template <typename Step>
  void walk(const TileTask& t, const Step& step) const {
    for (int64_t i = 0; i < count_; ++i) {
      step({steps_[i + 2], steps_[i + 1], steps_[i], t.scores[1 - i % 2], t.scores[i % 2]});
    }
  }

 private:
  void add(const TileStep& step) {
    if (!step.exists()) {
      return;
    }
    if (steps_[count_ - 1].exists() && steps_[count_ - 1].row_tile == step.row_tile) {
      steps_[count_++] = TileStep{};
    }
    steps_[count_++] = step;
  }

  // Row tiles by blocks, as many empty ones between them at most, and those at the ends.
  TileStep steps_[2 * (kQueryRows / 16) * (kKeyChunk / kKeyBlock) + 4];
  int64_t count_ = 2;
};

/// All rows and a packed chunk of blocks. Steps overlap: see mixed_steps.
template <int kCode>
void attend_chunk(const AttentionTask& task,
                  const TileTask& t,
                  const int64_t (&keys)[2],
                  int64_t first_block) {
  const StepList steps(task, t, keys, first_block);
  steps.walk(t, [&](const Steps& s) { run_steps<kCode>(task, t, s); });
}

/// Block `index` of a chunk.
inline TileBlock block_of(const TileBlock& chunk, int64_t index) {
  TileBlock block = chunk;
  block.keys += index * kKeyBlock * 64 * chunk.width;
  block.values += index * kKeyBlock * 64 * chunk.width;
  block.score_scale += index * kKeyBlock;
  block.score_offset += index * kKeyBlock;
  block.logs += index * kKeyBlock;
  block.inverses += index * kKeyBlock;
  block.offsets += index * kKeyBlock;
  block.rests += index * kKeyBlock;
  return block;
}

template <int kCode, bool kWhole>
void sum_wide(const AttentionTask& task, const TileTask& t, const int64_t (&keys)[2]) {
  BlockGroups groups;
  for (int64_t at = keys[0] / kKeyBlock * kKeyBlock; at < keys[1]; at += kKeyChunk) {
    const int64_t chunk[2] = {larger(keys[0], at), smaller(keys[1], at + kKeyChunk)};
    for (int64_t b = 0; at + b * kKeyBlock < chunk[1]; ++b) {
      const PackRange pack = pack_range(chunk, at + b * kKeyBlock);
      const TileBlock block = block_of(t.block, b);
      prefetch_rows(task, pack.at + kKeyBlock, pack.at + 2 * kKeyBlock, keys[1]);
      find_block(task, pack, t.copies, groups);
      pack_params<kCode>(task, pack, groups, block);
      pack_keys<kCode, kWhole>(task, pack, groups, false, block);
      pack_values<kCode, kWhole>(task, pack, groups, block);
    }
    attend_chunk<kCode>(task, t, chunk, at);
  }
}

/// Of the rows of a row tile: what merge_states works on.
template <int kCode>
struct PieceSums {
  float top[16];
  float sum[16];
  float offset[16];

  PieceSums(const TileTask& t, int64_t row_tile) {
    for (int64_t i = 0; i < 16; ++i) {
      const int64_t r = row_tile * 16 + i;
      top[i] = ExponentRange<kCode>::kBase - t.shift[r];
      sum[i] = Simd::reduce_add(Simd::load(t.sums + r * 16));
      offset[i] = Simd::reduce_add(Simd::load(t.offsets + r * 16));
    }
  }
};

template <int kCode>
F32x16 acc_of(const TileTask& t, int64_t r, int64_t d, float offset) {
  const F32x16 acc = acc_dims<kCode>(acc_tile(t, r / 16, d / 32 * 2) + r % 16 * 64, d % 32 / 16);
  return kCode == 3 ? Simd::add(acc, Simd::set(offset)) : acc;
}

template <int kCode>
void write_states(const AttentionTask& task, const TileTask& t, const RowStates& states) {
  const int64_t padded_dim = round_up(task.kv.head_dim, 16);
  for (int64_t tile = 0; tile * 16 < t.rows; ++tile) {
    const PieceSums<kCode> sums(t, tile);
    for (int64_t r = tile * 16; r < smaller(t.rows, tile * 16 + 16); ++r) {
      states.top[r] = sums.top[r % 16];
      states.sum[r] = sums.sum[r % 16];
      for (int64_t d = 0; d < padded_dim; d += 16) {
        Simd::store(states.acc + r * padded_dim + d, acc_of<kCode>(t, r, d, sums.offset[r % 16]));
      }
    }
  }
}

/// merge_states of the tiles' sums, 16 rows at a time.
template <int kCode>
void merge_tiles(const AttentionTask& task, const TileTask& t, const RowStates& total) {
  const int64_t padded_dim = round_up(task.kv.head_dim, 16);
  for (int64_t tile = 0; tile * 16 < t.rows; ++tile) {
    const PieceSums<kCode> sums(t, tile);
    const int64_t count = smaller(16, t.rows - tile * 16);
    const F32x16 total_top = load_lanes(total.top + tile * 16, count);
    const F32x16 piece_top = Simd::load(sums.top);
    const F32x16 top = Simd::select_less(piece_top, total_top, total_top, piece_top);
    float keep[16];
    float add[16];
    Simd::store(keep, exp2_weight(Simd::sub(total_top, top)));
    Simd::store(add, exp2_weight(Simd::sub(piece_top, top)));
    float tops[16];
    Simd::store(tops, top);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t r = tile * 16 + i;
      total.top[r] = tops[i];
      total.sum[r] = __builtin_fmaf(sums.sum[i], add[i], total.sum[r] * keep[i]);
      for (int64_t d = 0; d < padded_dim; d += 16) {
        float* acc = total.acc + r * padded_dim + d;
        const F32x16 kept = Simd::mul(Simd::load(acc), Simd::set(keep[i]));
        const F32x16 piece = acc_of<kCode>(t, r, d, sums.offset[i]);
        Simd::store(acc, Simd::fma(piece, Simd::set(add[i]), kept));
      }
    }
  }
}

/// Sums over the keys first .. end-1, which lie in one piece.
template <int kCode>
void sum_tiles(const AttentionTask& task, const TileTask& t, const int64_t (&keys)[2]) {
  const int64_t rows = round_up(t.rows, 16);
  __builtin_memset(t.sums, 0, static_cast<size_t>(rows) * 64);
  __builtin_memset(t.offsets, 0, static_cast<size_t>(rows) * 64);
  __builtin_memset(t.acc, 0, static_cast<size_t>(rows / 16 * 2 * t.width * kTileBytes));
  for (int64_t r = 0; r < rows; ++r) {
    t.shift[r] = ExponentRange<kCode>::kBase - kLowest;
  }
  if (task.kv.head_dim % 32 == 0) {
    t.narrow ? sum_narrow<kCode, true>(task, t, keys) : sum_wide<kCode, true>(task, t, keys);
  } else {
    t.narrow ? sum_narrow<kCode, false>(task, t, keys) : sum_wide<kCode, false>(task, t, keys);
  }
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
  const auto take_halves = [&](int64_t count) {
    return reinterpret_cast<uint16_t*>(take(count * 2));
  };
  t.block.width = t.width;
  const int64_t keys = t.narrow ? kKeyBlock : kKeyChunk;
  t.block.keys = take(keys * t.width * 64);
  t.block.values = take(keys * t.width * 64);
  for (uint8_t*& scores : t.scores) {
    scores = take(kKeyGroups * kTileBytes);
  }
  t.block.score_scale = take_floats(keys);
  t.block.score_offset = take_floats(keys);
  t.block.logs = take_halves(keys);
  t.block.inverses = take_halves(keys);
  t.block.offsets = take_halves(keys);
  t.block.rests = take_halves(keys);
  t.queries = take(rows * t.width * 64);
  t.acc = take(rows * t.width * 128);
  t.sums = take_floats(rows * 16);
  t.offsets = take_floats(rows * 16);
  t.q_sum = take_floats(rows);
  t.shift = take_floats(rows);
  t.positions = reinterpret_cast<int32_t*>(take(rows * 4));
  t.copies = take(kKeyBlock / kGroupKeys * kGroupCopyBytes);
  load_query_tiles(task, t);
  configure_tiles(16);
  in_pieces(task, reinterpret_cast<float*>(at),
            [&](int64_t first, int64_t end, const RowStates& total, bool is_first) {
              sum_tiles<kCode>(task, t, {first, end});
              is_first ? write_states<kCode>(task, t, total) : merge_tiles<kCode>(task, t, total);
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
