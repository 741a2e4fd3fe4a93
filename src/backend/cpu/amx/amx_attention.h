#pragma once

// Attention over BF16, FP8, INT8 and INT4 caches in AMX tiles, with the bits of
// kernels/attention_kernels.h. A tile product is just the sum over 32 elements described there.
// Many query rows: scores = Q·Kᵀ, keys transposed once per block for all rows of the task. Up to 16
// rows, as in decoding: scoresᵀ = K·Qᵀ takes the keys as they lie, and the scores are transposed.

#include "backend/cpu/amx/amx_attention_mixed.h"
#include "backend/cpu/amx/amx_attention_narrow.h"

namespace nibble::cpu {
namespace {

/// The steps of a chunk that see keys, between two empty ones at each end: row tiles, of each its
/// blocks, so that sums stay in tiles.
class StepList {
 public:
  StepList(const AttentionTask& task,
           const TileTask& t,
           const int64_t (&keys)[2],
           int64_t first_block) {
    steps_[0] = steps_[1] = TileStep{};
    const int64_t tiles = (t.rows + 15) / 16;
    const int64_t blocks = (keys[1] - first_block + kKeyBlock - 1) / kKeyBlock;
    const auto range_at = [&](int64_t block, int64_t tile) {
      const PackRange pack = pack_range(keys, first_block + block * kKeyBlock);
      return range_of(task, t, block, pack.at, pack.range, tile);
    };
    TileRange first[kKeyChunk / kKeyBlock];
    for (int64_t block = 0; block < blocks; ++block) {
      first[block] = range_at(block, 0);
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
      for (int64_t block = 0; block < blocks; ++block) {
        // Without a window, later rows see what the first sees.
        const bool same = !first[block].masked && task.window == 0;
        const TileStep step{static_cast<int32_t>(tile),
                            same ? first[block] : range_at(block, tile)};
        if (step.exists()) {
          steps_[count_++] = step;
        }
      }
    }
    steps_[count_] = steps_[count_ + 1] = TileStep{};
  }

  /// Calls step(Steps) of all neighbours.
  template <typename Step>
  void walk(const TileTask& t, const Step& step) const {
    bool loaded = false;
    bool mixed = can_mix(0);
    for (int64_t i = 0; i < count_; ++i) {
      const bool next_mixed = can_mix(i + 1);
      const bool stay =
          t.width <= 2 && mixed && next_mixed && steps_[i].row_tile == steps_[i + 1].row_tile;
      step(Steps{steps_[i + 2], steps_[i + 1], steps_[i], t.scores[1 - i % 2], t.scores[i % 2],
                 mixed, loaded, stay});
      loaded = stay;
      mixed = next_mixed;
    }
  }

 private:
  /// Whether step i, as the oldest of three, and the next two can be mixed.
  [[nodiscard]] bool can_mix(int64_t i) const {
    return steps_[i].has_whole_block() && steps_[i + 1].exists() && steps_[i + 2].exists();
  }

  TileStep steps_[(kQueryRows / 16) * (kKeyChunk / kKeyBlock) + 4];
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
  block.keys += index * kKeyBlock * 64 * chunk.key_width;
  block.values += index * kKeyBlock * 64 * chunk.width;
  block.params += index;
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

  PieceSums(const TileTask& t, int64_t row_tile) {
    const RowTile& tile = t.row_tiles[row_tile];
    for (int64_t i = 0; i < 16; ++i) {
      top[i] = ExponentRange<kCode>::kBase - tile.shift[i];
      sum[i] = Simd::reduce_add(Simd::load(tile.sums[i]));
    }
  }
};

template <int kCode>
F32x16 acc_of(const TileTask& t, int64_t r, int64_t d) {
  return acc_dims<kCode>(acc_tile(t, r / 16, d / 32 * 2) + r % 16 * 64, d % 32 / 16);
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
        Simd::store(states.acc + r * padded_dim + d, acc_of<kCode>(t, r, d));
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
        const F32x16 piece = acc_of<kCode>(t, r, d);
        Simd::store(acc, Simd::fma(piece, Simd::set(add[i]), kept));
      }
    }
  }
}

/// Sums over the keys first .. end-1, which lie in one piece.
template <int kCode>
void sum_tiles(const AttentionTask& task, const TileTask& t, const int64_t (&keys)[2]) {
  const int64_t rows = round_up(t.rows, 16);
  __builtin_memset(t.acc, 0, static_cast<size_t>(rows / 16 * 2 * t.width * kTileBytes));
  for (int64_t tile = 0; tile < rows / 16; ++tile) {
    RowTile& row_tile = t.row_tiles[tile];
    __builtin_memset(row_tile.sums, 0, sizeof row_tile.sums);
    Simd::store(row_tile.shift, Simd::set(ExponentRange<kCode>::kBase - kLowest));
  }
  if (task.kv.head_dim % 64 == 0) {
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
  t.block.width = t.width;
  t.block.key_width = kCode == 1 ? t.width : (t.width + 1) / 2;
  const int64_t keys = t.narrow ? kKeyBlock : kKeyChunk;
  t.block.keys = take(keys * t.block.key_width * 64);
  t.block.values = take(keys * t.width * 64);
  for (uint8_t*& scores : t.scores) {
    scores = take(kKeyGroups * kTileBytes);
  }
  const int64_t param_bytes = keys / kKeyBlock * static_cast<int64_t>(sizeof(PackedParams));
  t.block.params = reinterpret_cast<PackedParams*>(take(param_bytes));
  // Weights of keys that were never packed are 0, which not all numbers make 0.
  __builtin_memset(t.block.params, 0, static_cast<size_t>(param_bytes));
  t.block.offsets = reinterpret_cast<float*>(take(kKeyBlock * 4));
  t.queries = take(rows * t.block.key_width * 64);
  t.acc = take(rows * t.width * 128);
  t.row_tiles = reinterpret_cast<RowTile*>(take(rows / 16 * sizeof(RowTile)));
  t.copies = take(kKeyBlock / kGroupKeys * kGroupCopyBytes);
  load_query_tiles<kCode>(task, t);
  configure_tiles(16);
  in_pieces(task, reinterpret_cast<float*>(at),
            [&](int64_t first, int64_t end, const RowStates& total, bool is_first) {
              sum_tiles<kCode>(task, t, {first, end});
              is_first ? write_states<kCode>(task, t, total) : merge_tiles<kCode>(task, t, total);
            });
  release_tiles();
}

}  // namespace
}  // namespace nibble::cpu
