#pragma once

#include <cstdint>

// Products of INT4 by one warp (PTX ISA, mma.sync m16n8k64 and m16n8k32): one instruction on sm_80
// to sm_89, which Hopper has not: it would run a routine of 190 instructions, so code for it must
// not call these.
namespace nibble::cuda::ptx {

/// d [16, 8] s32 += a [16, 64] s4 * b [64, 8] s4. Fragments, of lane l with g = l / 4 and t = l %
/// 4:
///   a[i]  row g + 8 (i & 1), columns 8 t + 32 (i >> 1) and the next seven
///   b[i]  rows 8 t + 32 i and the next seven, column g
///   d[i]  row g + 8 (i >> 1), column 2 t + (i & 1)
__device__ __forceinline__ void warp_mma_s4(int32_t (&d)[4],
                                            const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ < 900
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

/// The first halves of both: d [16, 8] s32 += a [16, 32] s4 * b [32, 8] s4.
__device__ __forceinline__ void warp_mma_s4_half(int32_t (&d)[4],
                                                 const uint32_t (&a)[2],
                                                 uint32_t b) {
#if __CUDA_ARCH__ < 900
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(b));
#endif
}

}  // namespace nibble::cuda::ptx
