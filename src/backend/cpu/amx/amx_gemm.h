#pragma once

// Matrix products in AMX tiles with the bits of gemm_kernels.h. A tile product adds 64 bytes of k,
// 64 int8 or 32 bf16 columns, as the vector kernels' blocks do. Two tiles of rows times two weight
// tiles are summed at once; a panel of weights (16 KiB) stays in the first-level cache while the
// rows pass by from the second level. Needs simd_avx512.h before.

#include "backend/cpu/amx/amx_walk.h"

namespace nibble::cpu {
namespace {

/// Turns a block's sums into results, row by row: memory takes long runs of a row faster than
/// pieces of many rows.
template <typename Kind>
void write_block(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  for (int64_t row = 0; row < task.m; ++row) {
    for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
      const F32x16 scales = task.w.groups == 1 ? load_scales(task.w, tile) : Simd::set(1.0F);
      const uint8_t* sums = kept_sums(task, row, tile - tile_begin) + row % 16 * 64;
      write_tile_row(task, row, tile, Kind::value(task, row, tile, scales, sums));
    }
  }
}

/// bf16 products: the scale of the row of weights, if any, times that of the activations, if any.
struct FloatSums {
  static F32x16 value(
      const TileGemmTask& task, int64_t row, int64_t /*tile*/, F32x16 scales, const uint8_t* sums) {
    const F32x16 sum = Simd::load(reinterpret_cast<const float*>(sums));
    if (task.w.groups != 1) {
      return sum;
    }
    const bool per_row = task.x_scales != nullptr;
    return Simd::mul(sum, per_row ? Simd::mul(scales, Simd::set(task.x_scales[row])) : scales);
  }
  template <int kC, int kA, int kB>
  static void product() {
    dot_bf16<kC, kA, kB>();
  }
};

template <typename Codec>
struct IntSums {
  static F32x16 value(
      const TileGemmTask& task, int64_t row, int64_t tile, F32x16 scales, const uint8_t* sums) {
    return int_result<Codec>(task, row, tile, scales, Simd::load_int(sums));
  }
};

struct Int8Sums : IntSums<IntCodecInt8> {
  template <int kC, int kA, int kB>
  static void product() {
    dot_u8s8<kC, kA, kB>();
  }
};

struct Int4Sums : IntSums<IntCodecInt4> {
  template <int kC, int kA, int kB>
  static void product() {
    dot_s8u8<kC, kA, kB>();
  }
};

/// Columns [first, first + products) of a pair of weight tiles, as AMX reads them.
struct PanelPair {
  const uint8_t* tiles[2];
  int64_t products;
};

/// kM x kN tiles of sums (1 or 2 each) over the panel's columns; x points at the panel's first
/// activations of the first tile of rows.
template <typename Kind, int kM, int kN>
[[gnu::always_inline]] inline void multiply(const PanelPair& panel,
                                            const uint8_t* x,
                                            Ahead& ahead) {
  const uint8_t* second = x + kSlabPieces * kTileBytes;
  for (int64_t p = 0; p < panel.products; ++p) {
    const int64_t at = p * kTileBytes;
    ahead.step();
    load_tile<6>(panel.tiles[0] + at);
    load_tile<4>(x + at);
    Kind::template product<0, 4, 6>();
    if constexpr (kN == 2) {
      load_tile<7>(panel.tiles[1] + at);
      Kind::template product<1, 4, 7>();
    }
    if constexpr (kM == 2) {
      load_tile<5>(second + at);
      Kind::template product<2, 5, 6>();
      if constexpr (kN == 2) {
        Kind::template product<3, 5, 7>();
      }
    }
  }
}

template <int kM, int kN>
inline void zero_sums() {
  zero_tile<0>();
  if constexpr (kN == 2) {
    zero_tile<1>();
  }
  if constexpr (kM == 2) {
    zero_tile<2>();
    if constexpr (kN == 2) {
      zero_tile<3>();
    }
  }
}

/// Sums as kept_sums() places them: two weight tiles side by side for each tile of rows.
template <int kM, int kN>
inline void load_sums(const uint8_t* sums) {
  load_tile<0>(sums);
  if constexpr (kN == 2) {
    load_tile<1>(sums + kTileBytes);
  }
  if constexpr (kM == 2) {
    load_tile<2>(sums + 2 * kTileBytes);
    if constexpr (kN == 2) {
      load_tile<3>(sums + 3 * kTileBytes);
    }
  }
}

template <int kM, int kN>
inline void store_sums(uint8_t* sums) {
  store_tile<0>(sums);
  if constexpr (kN == 2) {
    store_tile<1>(sums + kTileBytes);
  }
  if constexpr (kM == 2) {
    store_tile<2>(sums + 2 * kTileBytes);
    if constexpr (kN == 2) {
      store_tile<3>(sums + 3 * kTileBytes);
    }
  }
}

template <typename Kind, int kM, int kN>
void multiply_rows(const TileGemmTask& task,
                   const PanelPair& panel,
                   const KBlock& block,
                   int64_t row,
                   uint8_t* sums,
                   Ahead& ahead) {
  const uint8_t* x = block_rows(task, block, row);
  if (block.starts) {
    zero_sums<kM, kN>();
  } else {
    load_sums<kM, kN>(sums);
  }
  multiply<Kind, kM, kN>(panel, x, ahead);
  store_sums<kM, kN>(sums);
}

/// All rows times one or two weight tiles, over one block of columns.
template <typename Kind, int kN>
void multiply_panel(const TileGemmTask& task,
                    const PanelPair& panel,
                    const KBlock& block,
                    int64_t tile_in_block,
                    Ahead& ahead) {
  int64_t row = 0;
  for (; row + 16 < task.m; row += 32) {
    multiply_rows<Kind, 2, kN>(task, panel, block, row, kept_sums(task, row, tile_in_block), ahead);
  }
  if (row < task.m) {
    multiply_rows<Kind, 1, kN>(task, panel, block, row, kept_sums(task, row, tile_in_block), ahead);
  }
}

template <typename Panel>
PanelPair make_panel(const TileGemmTask& task, int64_t tile, int64_t tiles, const KBlock& block) {
  if constexpr (Panel::kDirect) {
    const uint8_t* source = task.w.codes + tile * task.w.tile_bytes + block.first * kTileBytes;
    return {{source, source + task.w.tile_bytes}, block.count};
  } else {
    expand_panel<Panel>(task, tile, tiles, block);
    return {{task.scratch, task.scratch + block.count * kTileBytes}, block.count};
  }
}

/// One step of the walk.
struct PanelStep {
  KBlock block;
  int64_t tile;
  int64_t tile_in_block;
  int64_t tiles;  // 1 or 2
  Ahead ahead;
};

/// multiply(step) for every step, and the results of each block of weight tiles when its sums are
/// complete. multiply() calls step.ahead.step() ahead_steps(block) times.
template <typename Panel, typename Kind, typename AheadSteps, typename Multiply>
[[gnu::always_inline]] inline void for_panels(const TileGemmTask& task,
                                              int64_t tile_begin,
                                              int64_t tile_end,
                                              const AheadSteps& ahead_steps,
                                              const Multiply& multiply) {
  configure_tiles(task.m < 16 ? task.m : 16);
  Walk walk{.end = tile_end, .products = task.x_pieces, .block_begin = tile_begin};
  for (Place place{tile_begin, 0}; place.tile < tile_end;) {
    const KBlock block = walk.columns(place);
    const int64_t tile = place.tile;
    const int64_t tiles = walk.block_end() - tile < kStepTiles ? 1 : kStepTiles;
    place = walk.after(place);
    const int64_t count = ahead_steps(block);
    PanelStep step{block, tile, tile - walk.block_begin, tiles,
                   Ahead{prefetch_at<Panel>(task, walk, place, count),
                         rows_ahead(task, walk, tile, block, count)}};
    multiply(step);
    if (block.ends && tile + tiles == walk.block_end()) {
      write_block<Kind>(task, walk.block_begin, walk.block_end());
    }
    walk.move_to(place);
  }
  release_tiles();
}

/// Sums that run over all of k: no scales, or one per row of weights.
template <typename Panel, typename Kind>
void tile_gemm(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  const int64_t row_pairs = (task.m + 31) / 32;
  for_panels<Panel, Kind>(
      task, tile_begin, tile_end, [&](const KBlock& block) { return row_pairs * block.count; },
      [&](PanelStep& step) {
        const PanelPair panel = make_panel<Panel>(task, step.tile, step.tiles, step.block);
        if (step.tiles == 2) {
          multiply_panel<Kind, 2>(task, panel, step.block, step.tile_in_block, step.ahead);
        } else {
          multiply_panel<Kind, 1>(task, panel, step.block, step.tile_in_block, step.ahead);
        }
      });
}

}  // namespace
}  // namespace nibble::cpu
