#pragma once

#include <cstdint>

// Products of one warp whose sums begin with others; fragments as in ptx/mma.cuh.
namespace nibble::cuda::ptx {

/// d [16, 8] f32 = a [16, 16] bf16 * b [16, 8] bf16 + c (PTX ISA, mma.sync m16n8k16).
__device__ __forceinline__ void warp_mma_bf16_sum(
    float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]),
        "f"(c[2]), "f"(c[3]));
}

/// d [16, 8] s32 = a [16, 32] s8 * b [32, 8] s8 + c, fragments as in ptx/mma_s8.cuh.
__device__ __forceinline__ void warp_mma_s8_sum(
    int32_t (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

}  // namespace nibble::cuda::ptx
