#pragma once

// Products of up to 16 rows with 4-bit weights in groups, as decoding has them: one weight tile at
// a time over all of k, expanded right before its product, so that weights are read as one stream
// and no panel is written and read again. The bits are those of gemm_kernels.h.

#include <utility>

#include "backend/cpu/amx/amx_grouped.h"

namespace nibble::cpu {
namespace {

/// One weight tile times all rows.
struct FewTask {
  PackedWeights w;
  const uint8_t* codes;
  int64_t scale_index;
  const uint8_t* x;
  const float* row_scales;
  int64_t slab_stride;
  int64_t products;
  uint8_t* weights;  // [kRing] tiles
  uint8_t* sums;     // [kRing] tiles
};

/// The stages of a product, each some products later than the one before: expand its weights,
/// multiply, store a group's sums, scale and add them. Groups take turns in tiles of sums; kPhase
/// is the product's place in one such turn.
template <typename Panel, typename Kind, int kProducts, int kRows>
struct FewPipeline {
  static constexpr int kSumTiles = kProducts == 1 ? 4 : 2;
  static constexpr int kPhases = kSumTiles * kProducts;
  static constexpr int64_t kRing = 8;
  static constexpr int kMultiplyLag = 1;
  static constexpr int kStoreLag = 3;
  static constexpr int kAddLag = 5;

  static constexpr bool begins_group(int phase) { return phase % kProducts == 0; }
  static constexpr bool ends_group(int phase) { return phase % kProducts == kProducts - 1; }

  template <int kPhase>
  [[gnu::always_inline]] static void multiply(const FewTask& task, int64_t product) {
    constexpr int kSum = kPhase / kProducts;
    if constexpr (begins_group(kPhase)) {
      load_zeros<kSum>();
    }
    load_tile<4 + kPhase % 2>(task.x + product / kSlabPieces * task.slab_stride +
                              product % kSlabPieces * kTileBytes);
    load_tile<6 + kPhase % 2>(task.weights + product % kRing * kTileBytes);
    Kind::template product<kSum, 4 + kPhase % 2, 6 + kPhase % 2>();
  }

  [[gnu::always_inline]] static void add(const FewTask& task,
                                         int64_t product,
                                         F32x16 (&total)[kRows]) {
    const int64_t group = product / kProducts;
    add_group<Kind>(task.sums + product % kRing * kTileBytes,
                    load_scales(task.w, task.scale_index + group),
                    task.row_scales + group * (Kind::kRowScales ? 16 : 0), total);
  }

  template <int kPhase>
  [[gnu::always_inline]] static void step(const FewTask& task, int64_t p, F32x16 (&total)[kRows]) {
    constexpr int kMultiplied = (kPhase + kPhases - kMultiplyLag) % kPhases;
    constexpr int kStored = (kPhase + kPhases - kStoreLag) % kPhases;
    constexpr int kAdded = (kPhase + 2 * kPhases - kAddLag) % kPhases;
    if (p < task.products) {
      const uint8_t* codes = task.codes + p * Panel::kSourceBytes;
      fetch_ahead(codes, Panel::kSourceBytes, Simd::kFarBytes);
      expand_tile<Panel>(codes, task.weights + p % kRing * kTileBytes);
    }
    if constexpr (ends_group(kAdded)) {
      if (p >= kAddLag && p - kAddLag < task.products) {
        add(task, p - kAddLag, total);
      }
    }
    if constexpr (ends_group(kStored)) {
      if (p >= kStoreLag && p - kStoreLag < task.products) {
        store_tile<kStored / kProducts>(task.sums + (p - kStoreLag) % kRing * kTileBytes);
      }
    }
    if (p >= kMultiplyLag && p - kMultiplyLag < task.products) {
      multiply<kMultiplied>(task, p - kMultiplyLag);
    }
  }

  template <int... kSteps>
  [[gnu::always_inline]] static void steps(std::integer_sequence<int, kSteps...> /*phases*/,
                                           const FewTask& task,
                                           int64_t p,
                                           F32x16 (&total)[kRows]) {
    (step<kSteps>(task, p + kSteps, total), ...);
  }

  static void run(const TileGemmTask& gemm, int64_t tile) {
    const FewTask task{gemm.w,
                       gemm.w.codes + tile * gemm.w.tile_bytes,
                       tile * gemm.w.groups,
                       gemm.x,
                       row_scales_at<Kind>(gemm, 0, 0),
                       gemm.slab_stride,
                       gemm.x_pieces,
                       gemm.scratch,
                       gemm.scratch + kRing * kTileBytes};
    F32x16 total[kRows];
#pragma GCC unroll 16
    for (F32x16& row : total) {
      row = Simd::set(0.0F);
    }
    for (int64_t p = 0; p < task.products + kAddLag; p += kPhases) {
      steps(std::make_integer_sequence<int, kPhases>(), task, p, total);
    }
    auto* results = reinterpret_cast<float*>(task.sums);
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
      Simd::store(results + row * 16, total[row]);
    }
    for (int64_t row = 0; row < gemm.m; ++row) {
      write_tile_row(gemm, row, tile, with_token_scale(gemm, row, Simd::load(results + row * 16)));
    }
  }
};

template <typename Panel, typename Kind, int kProducts, int kRows>
void multiply_few(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  configure_tiles(task.m);
  // Rows past m are added, too, but never stored: denormals there would take five times as long.
  using Pipeline = FewPipeline<Panel, Kind, kProducts, kRows>;
  constexpr auto kSumsBytes = Pipeline::kRing * kTileBytes;
  __builtin_memset(task.scratch + kSumsBytes, 0, kSumsBytes);
  for (int64_t tile = tile_begin; tile < tile_end; ++tile) {
    Pipeline::run(task, tile);
  }
  release_tiles();
}

/// Groups of kProducts * Kind::kColumns columns, up to 16 rows.
template <typename Panel, typename Kind, int kProducts>
void tile_gemm_few(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  if (task.m <= 4) {
    multiply_few<Panel, Kind, kProducts, 4>(task, tile_begin, tile_end);
  } else if (task.m <= 8) {
    multiply_few<Panel, Kind, kProducts, 8>(task, tile_begin, tile_end);
  } else {
    multiply_few<Panel, Kind, kProducts, 16>(task, tile_begin, tile_end);
  }
}

}  // namespace
}  // namespace nibble::cpu
