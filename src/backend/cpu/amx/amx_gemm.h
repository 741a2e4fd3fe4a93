#pragma once

// Matrix products in AMX tiles with the bits of gemm_kernels.h. A tile product adds 64 bytes of k,
// 64 int8 or 32 bf16 columns, as the vector kernels' blocks do. Two tiles of rows times two weight
// tiles are summed at once; the first 32 KiB of a panel of weights stay in the first-level cache
// while the rows, and other weights, pass by from the second level. Between the tile instructions,
// which leave the vector unit idle, the results before are written and the next panel is expanded.
// Needs simd_avx512.h before.

#include "backend/cpu/amx/amx_results.h"

namespace nibble::cpu {
namespace {

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

struct LevelsSums : IntSums<IntCodecLevels> {
  template <int kC, int kA, int kB>
  static void product() {
    dot_s8u8<kC, kA, kB>();
  }
};

// Of a panel's products, those whose weights stay in the first level. All else passes by it.
constexpr int64_t kNearProducts = 16;

template <int kTile, bool kNear>
[[gnu::always_inline]] inline void load_weights(const uint8_t* p) {
  if constexpr (kNear) {
    load_tile<kTile>(p);
  } else {
    stream_tile<kTile>(p);
  }
}

/// kM x kN tiles of sums (1 or 2 each) over products [first, end) of a slab of activations, and
/// beside(product) after each.
template <typename Kind, int kM, int kN, bool kNear, typename Beside>
[[gnu::always_inline]] inline void multiply_slab(
    const PanelPair& panel, int64_t first, int64_t end, const uint8_t* x, const Beside& beside) {
  const uint8_t* second = x + kSlabPieces * kTileBytes;
  for (int64_t p = first; p < end; ++p) {
    const int64_t at = p * kTileBytes;
    const int64_t x_at = at - first * kTileBytes;
    load_weights<6, kNear>(panel.tiles[0] + at);
    stream_tile<4>(x + x_at);
    Kind::template product<0, 4, 6>();
    if constexpr (kN == 2) {
      load_weights<7, kNear>(panel.tiles[1] + at);
      Kind::template product<1, 4, 7>();
    }
    if constexpr (kM == 2) {
      stream_tile<5>(second + x_at);
      Kind::template product<2, 5, 6>();
      if constexpr (kN == 2) {
        Kind::template product<3, 5, 7>();
      }
    }
    beside(p);
  }
}

/// kM x kN tiles of sums (1 or 2 each) over the panel's columns; x points at the panel's first
/// activations of the first tile of rows.
template <typename Kind, int kM, int kN, typename Beside>
[[gnu::always_inline]] inline void multiply(const PanelPair& panel,
                                            const uint8_t* x,
                                            int64_t slab_stride,
                                            const Beside& beside) {
  for (int64_t first = 0; first < panel.products; first += kSlabPieces) {
    const int64_t left = panel.products - first;
    const int64_t end = first + (left < kSlabPieces ? left : kSlabPieces);
    if (first < kNearProducts) {
      multiply_slab<Kind, kM, kN, true>(panel, first, end, x, beside);
    } else {
      multiply_slab<Kind, kM, kN, false>(panel, first, end, x, beside);
    }
    x += slab_stride;
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

/// Sums as kept_sums() and Results place them: two weight tiles side by side for each tile of rows.
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

/// The weights of the next panel's product in the place of this one's.
template <typename Panel, int kN>
[[gnu::noinline]] void expand_next(const TileGemmTask& task, const PanelPair& panel, int64_t p) {
  for (int64_t i = 0; i < kN; ++i) {
    expand_tile<Panel>(task.w, panel.next[i] + p * Panel::kSourceBytes,
                       task.scratch + (i * panel.products + p) * kTileBytes);
  }
}

/// The products of a step and what is done between them.
template <typename Panel, typename Kind, int kN>
struct StepProducts {
  const TileGemmTask& task;
  const PanelPair& panel;
  PanelStep& step;
  Results<Kind>& results;

  /// kM tiles of rows; `last` when no more follow.
  template <int kM>
  void rows(int64_t row, bool last) {
    const KBlock& block = step.block;
    uint8_t* kept = kept_sums(task, row, step.tile_in_block);
    if (block.starts) {
      zero_sums<kM, kN>();
    } else {
      load_sums<kM, kN>(kept);
    }
    const bool expands = last && panel.next[0] != nullptr;
    multiply<Kind, kM, kN>(
        panel, block_rows(task, block, row),
        task.slab_stride, [&](int64_t p) __attribute__((always_inline)) {
          step.ahead.step();
          results.step(block.count);
          if constexpr (!Panel::kDirect) {
            if (expands) {
              expand_next<Panel, kN>(task, panel, p);
            }
          }
        });
    if (block.ends) {
      store_sums<kM, kN>(results.room());
      results.start(row, kM, step.tile, step.tiles);
    } else {
      store_sums<kM, kN>(kept);
    }
  }

  void all_rows() {
    int64_t row = 0;
    for (; row + 16 < task.m; row += 32) {
      rows<2>(row, row + 32 >= task.m);
    }
    if (row < task.m) {
      rows<1>(row, true);
    }
  }
};

/// Sums that run over all of k: no scales, or one per row of weights.
template <typename Panel, typename Kind>
void tile_gemm(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  constexpr int64_t kPanelBytes = kStepTiles * kMostProducts * kTileBytes;
  static_assert(kPanelBytes + 4 * kTileBytes <= kTilePanelBytes);
  Panels<Panel> panels(task);
  Results<Kind> results(task, task.scratch + kPanelBytes);
  const int64_t row_pairs = (task.m + 31) / 32;
  for_panels<Panel>(
      task, sums_range(task, tile_begin, tile_end),
      [&](const KBlock& block) { return row_pairs * block.count; },
      [&](PanelStep& step) {
        const PanelPair panel = panels.begin(step);
        if (step.tiles == kStepTiles) {
          StepProducts<Panel, Kind, 2>{task, panel, step, results}.all_rows();
        } else {
          StepProducts<Panel, Kind, 1>{task, panel, step, results}.all_rows();
        }
      });
}

}  // namespace
}  // namespace nibble::cpu
