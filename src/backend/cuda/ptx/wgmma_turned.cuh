#pragma once

#include <cstdint>

#include "backend/cuda/ptx/wgmma.cuh"

namespace nibble::cuda::ptx {

/// d [64, kTokens] f32 += a [64, 16] bf16 * b [16, kTokens] bf16, both in shared memory, where a
/// lies with its 64 rows contiguous (ptx/wgmma.cuh has the other forms).
template <int kTokens>
__device__ __forceinline__ void mma_shared_turned(float (&d)[kTokens / 2], uint64_t a, uint64_t b) {
  static_assert(kMmaTokens<kTokens>);
#if __CUDA_ARCH_FEAT_SM90_ALL
  constexpr MmaType kType = MmaType::kBf16;
  constexpr bool kTokensMajor = false;
  NIBBLE_MMA_SIZES(S, ",p,1,1,1,0;\n}", "", "l"(a), "l"(b))
#endif
}

}  // namespace nibble::cuda::ptx
