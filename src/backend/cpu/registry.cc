#include "backend/cpu/registry.h"

#include <algorithm>
#include <array>

#include "backend/cpu/cpu_gemm.h"

namespace nibble::cpu {
namespace {

using enum WeightCode;
using Acts = std::array<ActFormat, 2>;

constexpr Acts kBf16Only = {ActFormat::kBf16, ActFormat::kBf16};
constexpr Acts kInt8Only = {ActFormat::kInt8Token, ActFormat::kInt8Token};
constexpr Acts kFp8GroupOnly = {ActFormat::kFp8Group, ActFormat::kFp8Group};
constexpr Acts kBlocksOnly = {ActFormat::kIntBlocks, ActFormat::kIntBlocks};
constexpr Acts kBf16BlocksOnly = {ActFormat::kBf16Blocks, ActFormat::kBf16Blocks};
constexpr Acts kFp8Only = {ActFormat::kFp8Token, ActFormat::kFp8Token};

// Products of weights in the tiles of PackedMatrix, for few rows and with AMX for many.

constexpr TiledProduct kW4A16Fixed{.name = "gemm_w4a16_fixed",
                                   .code = kInt4,
                                   .acts = kBf16Only,
                                   .scales = TiledScales::kUsualGroups,
                                   .rounding = TiledRounding::kFixed,
                                   .rows = &GemmKernels::gemm_int4_fixed,
                                   .tiles = &TileKernels::tiles_int4};
constexpr TiledProduct kW4A16{.name = "gemm_w4a16",
                              .code = kInt4,
                              .rows = &GemmKernels::gemm_int4,
                              .tiles = &TileKernels::tiles_int4};
constexpr TiledProduct kW4A16FixedZeros{.name = "gemm_w4a16_zeros_fixed",
                                        .code = kInt4,
                                        .acts = kBf16Only,
                                        .scales = TiledScales::kUsualGroups,
                                        .rounding = TiledRounding::kFixed,
                                        .zero_points = ZeroPoints::kPerScale,
                                        .rows = &GemmKernels::gemm_int4_fixed_zeros};
constexpr TiledProduct kW4A16Zeros{.name = "gemm_w4a16_zeros",
                                   .code = kInt4,
                                   .zero_points = ZeroPoints::kPerScale,
                                   .rows = &GemmKernels::gemm_int4_zeros};
constexpr TiledProduct kW4A16FixedMinimums{.name = "gemm_w4a16_minimums_fixed",
                                           .code = kInt4,
                                           .acts = kBf16Only,
                                           .scales = TiledScales::kUsualGroups,
                                           .rounding = TiledRounding::kFixed,
                                           .zero_points = ZeroPoints::kMinimum,
                                           .rows = &GemmKernels::gemm_int4_fixed_minimums};
constexpr TiledProduct kW4A16Minimums{.name = "gemm_w4a16_minimums",
                                      .code = kInt4,
                                      .zero_points = ZeroPoints::kMinimum,
                                      .rows = &GemmKernels::gemm_int4_minimums};
constexpr TiledProduct kW8A16Zeros{.name = "gemm_w8a16_zeros",
                                   .code = kInt8,
                                   .zero_points = ZeroPoints::kPerScale,
                                   .rows = &GemmKernels::gemm_int8_zeros};
constexpr TiledProduct kFp4Product{.name = "gemm_fp4",
                                   .code = kFp4E2M1,
                                   .rows = &GemmKernels::gemm_fp4,
                                   .tiles = &TileKernels::tiles_fp4};
constexpr TiledProduct kFp4Fp8Product{.name = "gemm_fp4_fp8",
                                      .code = kFp4E2M1,
                                      .acts = kFp8Only,
                                      .rows = &GemmKernels::gemm_fp4,
                                      .tiles = &TileKernels::tiles_fp4};
constexpr TiledProduct kW4A8{.name = "gemm_w4a8",
                             .code = kInt4,
                             .acts = kInt8Only,
                             .scales = TiledScales::kChannel,
                             .rows = &GemmKernels::gemm_int4_int8,
                             .tiles = &TileKernels::tiles_int4_int8};
constexpr TiledProduct kW4A8Levels{.name = "gemm_w4a8_levels",
                                   .code = kInt4,
                                   .acts = kInt8Only,
                                   .scales = TiledScales::kLevels,
                                   .zero_points = ZeroPoints::kPerScale,
                                   .rows = &GemmKernels::gemm_levels_int8,
                                   .tiles = &TileKernels::tiles_levels_int8};
constexpr TiledProduct kW4Ax{.name = "gemm_w4ax",
                             .code = kInt4,
                             .acts = kBlocksOnly,
                             .scales = TiledScales::kBlocks,
                             .rows = &GemmKernels::gemm_int4_blocks,
                             .tiles = &TileKernels::tiles_int4_blocks};
constexpr TiledProduct kW4AxClass{.name = "gemm_w4ax_class",
                                  .code = kInt4,
                                  .acts = kBlocksOnly,
                                  .scales = TiledScales::kChannel,
                                  .rows = &GemmKernels::gemm_int4_int8,
                                  .tiles = &TileKernels::tiles_int4_int8};
constexpr TiledProduct kW4A8Bf16{.name = "gemm_w4a8_bf16",
                                 .code = kInt4,
                                 .acts = kBf16BlocksOnly,
                                 .scales = TiledScales::kChannel,
                                 .rows = &GemmKernels::gemm_int4_wide};
constexpr TiledProduct kW8A8Int8{.name = "gemm_w8a8_int8",
                                 .code = kInt8,
                                 .acts = kInt8Only,
                                 .scales = TiledScales::kChannel,
                                 .rows = &GemmKernels::gemm_int8_int8,
                                 .tiles = &TileKernels::tiles_int8_int8};
constexpr TiledProduct kW8A16Int8{.name = "gemm_w8a16_int8",
                                  .code = kInt8,
                                  .rows = &GemmKernels::gemm_int8,
                                  .tiles = &TileKernels::tiles_int8};
constexpr TiledProduct kW8A8Fp8{.name = "gemm_w8a8_fp8",
                                .code = kFp8E4M3,
                                .acts = kFp8Only,
                                .scales = TiledScales::kChannel,
                                .rows = &GemmKernels::gemm_fp8,
                                .tiles = &TileKernels::tiles_fp8};
constexpr TiledProduct kW8A8Fp8Group{.name = "gemm_w8a8_fp8_group",
                                     .code = kFp8E4M3,
                                     .acts = kFp8GroupOnly,
                                     .rows = &GemmKernels::gemm_fp8};
constexpr TiledProduct kW8A16Fp8{.name = "gemm_w8a16_fp8",
                                 .code = kFp8E4M3,
                                 .rows = &GemmKernels::gemm_fp8,
                                 .tiles = &TileKernels::tiles_fp8};
constexpr TiledProduct kBf16Product{.name = "gemm_bf16",
                                    .code = kBf16,
                                    .rows = &GemmKernels::gemm_bf16,
                                    .tiles = &TileKernels::tiles_bf16};
constexpr TiledProduct kF16Product{
    .name = "gemm_f16", .code = kF16, .rows = &GemmKernels::gemm_f16};
constexpr TiledProduct kF32Product{
    .name = "gemm_f32", .code = kF32, .rows = &GemmKernels::gemm_f32};

template <const TiledProduct& product>
constexpr GemmEntry kTiled{
    .name = product.name,
    .accepts = [](const GemmProblem& problem,
                  const GemmDevice& device) { return product.accepts(problem, device); },
    .make = [](const GemmRequest& request,
               const GemmDevice& device) { return CpuGemm::create(request, product, device); },
    .tiled = &product};

}  // namespace

std::span<const GemmEntry> gemm_entries() {
  static constexpr std::array kEntries = {
      kTiled<kW4A16Fixed>,
      kTiled<kW4A16>,
      kTiled<kW4A8>,
      kTiled<kW8A8Int8>,
      kTiled<kW8A16Int8>,
      kTiled<kW8A8Fp8>,
      kTiled<kW8A16Fp8>,
      kTiled<kBf16Product>,
      kTiled<kF16Product>,
      kTiled<kF32Product>,
      kTiled<kW4A16FixedZeros>,
      kTiled<kW4A16Zeros>,
      kTiled<kW8A16Zeros>,
      kTiled<kFp4Product>,
      kTiled<kW8A8Fp8Group>,
      kTiled<kW4A16FixedMinimums>,
      kTiled<kW4A16Minimums>,
      kTiled<kFp4Fp8Product>,
      kTiled<kW4A8Levels>,
      kTiled<kW4Ax>,
      kTiled<kW4AxClass>,
      kTiled<kW4A8Bf16>,
  };
  return kEntries;
}

}  // namespace nibble::cpu
