#pragma once

#include <cstdint>

#include "backend/cuda/ptx/wgmma.cuh"

namespace nibble::cuda::ptx {

/// d [64, kTokens] f32 += a [64, 16] fp16 from registers * b [16, kTokens] fp16 in shared memory,
/// K-major (ptx/wgmma.cuh has the fragments: four bytes of K are two numbers).
template <int kTokens>
__device__ __forceinline__ void mma_registers_f16(float (&d)[kTokens / 2],
                                                  const uint32_t (&a)[4],
                                                  uint64_t b) {
  static_assert(kTokens == 8 || kTokens == 16 || kTokens == 64);
#if __CUDA_ARCH_FEAT_SM90_ALL
#define NIBBLE_MMA_F16(sums, tokens)                                                           \
  NIBBLE_MMA(sums, tokens, "k16.f32.f16.f16", "+f", NIBBLE_A##sums, ",p,1,1,0;\n}", "r"(a[0]), \
             "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  if constexpr (kTokens == 8) {
    NIBBLE_MMA_F16(4, 8);
  } else if constexpr (kTokens == 16) {
    NIBBLE_MMA_F16(8, 16);
  } else {
    NIBBLE_MMA_F16(32, 64);
  }
#undef NIBBLE_MMA_F16
#endif
}

}  // namespace nibble::cuda::ptx
