#include NIBBLE_VECTORS
// The vocabulary comes first.
#include "backend/cpu/amx/amx_few.h"
#include "backend/cpu/amx/tile_gemm.h"

namespace nibble::cpu::NIBBLE_ISA {

void tile_gemm_int4(const TileGemmTask& task, int64_t tile_begin, int64_t tile_end) {
  if (task.m > 16 || task.w.groups <= 1) {
    return tile_gemm_float<Int4Pairs>(task, tile_begin, tile_end);
  }
  switch (task.w.group_size) {
    case 32:
      return tile_gemm_few<Int4Pairs, FloatGroups, 1>(task, tile_begin, tile_end);
    case 64:
      return tile_gemm_few<Int4Pairs, FloatGroups, 2>(task, tile_begin, tile_end);
    default:
      return tile_gemm_few<Int4Pairs, FloatGroups, 4>(task, tile_begin, tile_end);
  }
}

}  // namespace nibble::cpu::NIBBLE_ISA
