#pragma once

#include <cstdint>

namespace nibble::cuda::ptx {

/// d [16, 8] s32 += a [16, 32] s8 * b [32, 8] s8, by one warp (PTX ISA, mma.sync m16n8k32).
/// Fragments, of lane l with g = l / 4 and t = l % 4:
///   a[i]  row g + 8 (i & 1), columns 4 t + 16 (i >> 1) and the next three
///   b[i]  rows 4 t + 16 i and the next three, column g
///   d[i]  row g + 8 (i >> 1), column 2 t + (i & 1)
__device__ __forceinline__ void warp_mma_s8(int32_t (&d)[4],
                                            const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace nibble::cuda::ptx
