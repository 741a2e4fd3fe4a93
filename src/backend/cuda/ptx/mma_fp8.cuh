#pragma once

#include <cstdint>

namespace nibble::cuda::ptx {

/// d [16, 8] f32 += a [16, 32] e4m3 * b [32, 8] e4m3, by one warp (PTX ISA, mma.sync m16n8k32);
/// fragments as in ptx/mma_s8.cuh. From sm_89 on; nothing is added in code for older GPUs.
__device__ __forceinline__ void warp_mma_e4m3(float (&d)[4],
                                              const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
#if __CUDA_ARCH__ >= 890
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

}  // namespace nibble::cuda::ptx
