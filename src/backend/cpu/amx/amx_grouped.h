#pragma once

// Products with weights in groups, whose sums leave the tiles after every group to be scaled. The
// bits are those of gemm_kernels.h.

#include <utility>

#include "backend/cpu/amx/amx_gemm.h"

namespace nibble::cpu {
namespace {

/// total += scale * (sum of a group), 16 rows.
inline void add_group(const uint8_t* sums, F32x16 scale, F32x16 (&total)[16]) {
#pragma GCC unroll 16
  for (int64_t r = 0; r < 16; ++r) {
    total[r] =
        Simd::fma(Simd::load(reinterpret_cast<const float*>(sums) + r * 16), scale, total[r]);
  }
}

/// Where the groups of one tile of sums lie within a block of columns.
struct GroupedTile {
  const uint8_t* x;
  const uint8_t* w;
  int64_t scale_index;
  uint8_t* ring;  // kSlabPieces tiles
};

template <int kC, int kProducts>
[[gnu::always_inline]] inline void multiply_group(const uint8_t* x, const uint8_t* w) {
  zero_tile<kC>();
#pragma GCC unroll 4
  for (int64_t p = 0; p < kProducts * kTileBytes; p += kTileBytes) {
    load_tile<4 + kC % 2>(x + p);
    load_tile<6 + kC % 2>(w + p);
    dot_bf16<kC, 4 + kC % 2, 6 + kC % 2>();
  }
}

/// A slab's groups as a pipeline. A tile product takes 52 cycles and its sums pass through memory
/// to the vector unit, so while group i is multiplied, the sums of an earlier one are stored and
/// those of a still earlier one scaled and added. kSpread: what is fetched ahead is spread over the
/// groups.
template <int kProducts, bool kSpread>
struct GroupPipeline {
  static constexpr int kGroups = kSlabPieces / kProducts;
  static constexpr int kStoreLag = kProducts == 1 ? 2 : 1;
  static constexpr int kAddLag = kProducts == 1 ? 4 : 2;

  template <int kI>
  [[gnu::always_inline]] static void stage(const GroupedTile& tile,
                                           const PackedWeights& w,
                                           Ahead& ahead,
                                           F32x16 (&total)[16]) {
    if constexpr (kI < kGroups) {
      if constexpr (kSpread) {
        ahead.step();
      }
      constexpr int64_t kAt = kI * kProducts * kTileBytes;
      multiply_group<kI % 4, kProducts>(tile.x + kAt, tile.w + kAt);
    }
    if constexpr (kI >= kAddLag) {
      add_group(tile.ring + (kI - kAddLag) * kTileBytes,
                load_scales(w, tile.scale_index + kI - kAddLag), total);
    }
    if constexpr (kI >= kStoreLag && kI - kStoreLag < kGroups) {
      store_tile<(kI - kStoreLag) % 4>(tile.ring + (kI - kStoreLag) * kTileBytes);
    }
  }

  template <int... kStages>
  [[gnu::always_inline]] static void stages(std::integer_sequence<int, kStages...> /*stages*/,
                                            const GroupedTile& tile,
                                            const PackedWeights& w,
                                            Ahead& ahead,
                                            F32x16 (&total)[16]) {
    (stage<kStages>(tile, w, ahead, total), ...);
  }

  /// total += the sums of a block of columns of `count` tile products.
  [[gnu::always_inline]] static void run(const GroupedTile& tile,
                                         int64_t count,
                                         const PackedWeights& w,
                                         Ahead& ahead,
                                         F32x16 (&total)[16]) {
    if constexpr (!kSpread) {
      ahead.step();
    }
    if (count == kSlabPieces) {
      return stages(std::make_integer_sequence<int, kGroups + kAddLag>(), tile, w, ahead, total);
    }
    for (int64_t p = 0; p < count; p += kProducts) {
      if constexpr (kSpread) {
        ahead.step();
      }
      multiply_group<0, kProducts>(tile.x + p * kTileBytes, tile.w + p * kTileBytes);
      store_tile<0>(tile.ring);
      add_group(tile.ring, load_scales(w, tile.scale_index + p / kProducts), total);
    }
  }
};

/// All rows times the step's weight tiles over a block of columns.
template <int kProducts, bool kSpread>
void multiply_grouped(const TileGemmTask& task, PanelStep& step) {
  const KBlock& block = step.block;
  const PackedWeights w = task.w;
  const int64_t scale_index = step.tile * w.groups + block.first / kProducts;
  for (int64_t row = 0; row < task.m; row += 16) {
    const uint8_t* x = block_rows(task, block, row);
    for (int64_t i = 0; i < step.tiles; ++i) {
      auto* kept = reinterpret_cast<float*>(kept_sums(task, row, step.tile_in_block + i));
      F32x16 total[16];
#pragma GCC unroll 16
      for (int64_t r = 0; r < 16; ++r) {
        total[r] = block.starts ? Simd::set(0.0F) : Simd::load(kept + r * 16);
      }
      const GroupedTile grouped{x, task.scratch + i * block.count * kTileBytes,
                                scale_index + i * w.groups,
                                task.scratch + kTilePanelBytes - kSlabPieces * kTileBytes};
      GroupPipeline<kProducts, kSpread>::run(grouped, block.count, w, step.ahead, total);
#pragma GCC unroll 16
      for (int64_t r = 0; r < 16; ++r) {
        Simd::store(kept + r * 16, total[r]);
      }
    }
  }
}

template <typename Panel, int kProducts, bool kSpread>
void walk_grouped(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  for_panels<Panel, FloatSums>(
      task, {tile_begin, tile_end, kBlockTiles, kSlabPieces},
      [&](const KBlock& block, int64_t tiles) {
        return (task.m + 15) / 16 * tiles * (kSpread ? block.count / kProducts : 1);
      },
      [&](PanelStep& step) {
        expand_panel<Panel>(task, step.tile, step.tiles, step.block);
        multiply_grouped<kProducts, kSpread>(task, step);
      });
}

/// Weights in groups of 32, 64 or 128 columns. One tile of rows waits for weights, more for tiles.
template <typename Panel, int kProducts>
void tile_gemm_grouped(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  if (task.m <= 16) {
    walk_grouped<Panel, kProducts, true>(task, tile_begin, tile_end);
  } else {
    walk_grouped<Panel, kProducts, false>(task, tile_begin, tile_end);
  }
}

}  // namespace
}  // namespace nibble::cpu
