#pragma once

// Attention of up to 16 query rows, as in decoding: packing keys and values is most of the work.

#include "backend/cpu/amx/amx_attention_rows.h"

namespace nibble::cpu {
namespace {

/// Scores of a block's keys, transposed, by way of tiles 4 to 7.
template <int kCode>
void narrow_scores(const TileTask& t, uint8_t* scores) {
  for (int64_t g = 0; g < kKeyGroups; g += 2) {
    zero_tile<4>();
    zero_tile<5>();
    for (int64_t k = 0; k < t.block.key_width; ++k) {
      load_tile<7>(query_tile(t, 0, k));
      load_tile<6>(key_tile(t.block, g, k));
      dot_scores<kCode, 4, 6, 7>();
      load_tile<6>(key_tile(t.block, g + 1, k));
      dot_scores<kCode, 5, 6, 7>();
    }
    store_tile<4>(scores + g * kTileBytes);
    store_tile<5>(scores + (g + 1) * kTileBytes);
  }
}

/// The sums of up to 64 dims stay in tiles 0 to 3 from block to block; those of more in memory.
struct NarrowSums {
  const TileTask& t;
  bool in_tiles = t.width <= 2;

  void load() const {
    if (in_tiles) {
      load_acc(t, 0, 0);
    }
  }

  void store() const {
    if (in_tiles) {
      store_acc(t, 0, 0);
    }
  }

  void add(const TileRange& range, const uint8_t* weights) const {
    if (!in_tiles) {
      return add_values_of(t, 0, range, weights);
    }
    for (int64_t j = range.begin / 32; j < range.end / 32; ++j) {
      load_tile<6>(weights + j * kTileBytes);
      load_tile<7>(value_tile(t.block, j, 0));
      dot_bf16<0, 6, 7>();
      load_tile<4>(value_tile(t.block, j, 1));
      dot_bf16<1, 6, 4>();
      if (t.width == 2) {
        load_tile<5>(value_tile(t.block, j, 2));
        dot_bf16<2, 6, 5>();
        load_tile<7>(value_tile(t.block, j, 3));
        dot_bf16<3, 6, 7>();
      }
    }
  }
};

/// The next block's keys are packed between the weights and their products, those of later blocks
/// asked for in four parts between other work.
template <int kCode, bool kWhole>
void sum_narrow(const AttentionTask& task, const TileTask& t, const int64_t (&keys)[2]) {
  BlockGroups groups;
  const auto begin_block = [&](const PackRange& pack) {
    find_block(task, pack, t.copies, groups);
    pack_keys<kCode, kWhole>(task, pack, groups, true, t.block);
  };
  const auto prefetch = [&](int64_t at, int64_t part) {
    const int64_t first = at + 2 * kKeyBlock + part * kKeyBlock / 4;
    prefetch_rows(task, first, first + kKeyBlock / 4, keys[1]);
  };
  const NarrowSums sums{t};
  sums.load();
  PackRange pack = pack_range(keys, keys[0] / kKeyBlock * kKeyBlock);
  prefetch_rows(task, pack.at + pack.range[0], pack.at + 2 * kKeyBlock, keys[1]);
  begin_block(pack);
  while (pack.at < keys[1]) {
    const int64_t at = pack.at;
    prefetch(at, 0);
    const TileRange range = range_of(task, t, 0, pack.at, pack.range, 0);
    narrow_scores<kCode>(t, t.scores[0]);
    pack_params<kCode>(task, pack, groups, t.block);
    prefetch(at, 1);
    pack_values<kCode, kWhole>(task, pack, groups, t.block);
    prefetch(at, 2);
    for (int64_t g = range.begin / 16; g < range.end / 16; ++g) {
      uint8_t* tile = t.scores[0] + g * kTileBytes;
      t.rows <= 8 ? transpose_half(tile) : transpose_tile(tile, tile);
    }
    const TileRows rows(task, t, range, 0, t.scores[0]);
    const uint32_t skipped = weigh_rows<kCode>(rows, range);
    if (skipped != 0) {
      sums.store();
      weigh_skipped<kCode>(t, rows, 0, skipped);
      sums.load();
    }
    prefetch(at, 3);
    pack = pack_range(keys, at + kKeyBlock);
    if (pack.at < keys[1]) {
      begin_block(pack);
    }
    sums.add(range, weights_at(t.scores[0]));
  }
  sums.store();
}

}  // namespace
}  // namespace nibble::cpu
