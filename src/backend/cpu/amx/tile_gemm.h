#pragma once

#include "backend/cpu/amx/amx_grouped.h"

namespace nibble::cpu {
namespace {

template <typename Panel>
void tile_gemm_float(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  if constexpr (!Panel::kDirect) {
    const int64_t products = task.w.groups > 1 ? task.w.group_size / 32 : 0;
    if (products == 1) {
      return tile_gemm_grouped<Panel, FloatGroups, 1>(task, tile_begin, tile_end);
    }
    if (products == 2) {
      return tile_gemm_grouped<Panel, FloatGroups, 2>(task, tile_begin, tile_end);
    }
    if (products == 4) {
      return tile_gemm_grouped<Panel, FloatGroups, 4>(task, tile_begin, tile_end);
    }
  }
  tile_gemm<Panel, FloatSums>(task, tile_begin, tile_end);
}

}  // namespace

namespace NIBBLE_ISA {

/// Of 4-bit weights: source files of their own, for compiling each takes as long as all others.
void tile_gemm_int4(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end);
void tile_gemm_fp4(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end);
/// Of rows in blocks of 4 and 8 bits, with a scale for each block.
void tile_gemm_blocks(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end);

}  // namespace NIBBLE_ISA
}  // namespace nibble::cpu
