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

/// The same with a from shared memory, K-major too. kTokensMajor: b lies with its tokens
/// contiguous.
template <int kTokens, bool kTokensMajor = false>
__device__ __forceinline__ void mma_shared_f16(float (&d)[kTokens / 2], uint64_t a, uint64_t b) {
  static_assert(kTokensMajor ? kTokens == 128 : kTokens == 64);
#if __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (kTokensMajor) {
    NIBBLE_MMA(64, 128, "k16.f32.f16.f16", "+f", NIBBLE_S64, ",p,1,1,0,1;\n}", "l"(a), "l"(b));
  } else {
    NIBBLE_MMA(32, 64, "k16.f32.f16.f16", "+f", NIBBLE_S32, ",p,1,1,0,0;\n}", "l"(a), "l"(b));
  }
#endif
}

}  // namespace nibble::cuda::ptx
