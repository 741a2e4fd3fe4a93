#pragma once

#include "backend/cuda/ptx/wgmma.cuh"

namespace nibble::cuda::ptx {

// clang-format off
#define NIBBLE_FRESH(sums, tokens)                                                               \
  if constexpr (kTokens == tokens) {                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, 0, 0;\n"                                      \
                 "wgmma.mma_async.sync.aligned.m64n" #tokens "k32.s32.s8.s8"                     \
                 " {" NIBBLE_D##sums "}," NIBBLE_A##sums ",p;\n}"                                \
                 : NIBBLE_O##sums("+r", 0)                                                       \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                          \
  }
// clang-format on

/// mma_registers() of INT8 whose products replace what is in d.
template <int kTokens>
__device__ __forceinline__ void mma_fresh_s8(int32_t (&d)[kTokens / 2],
                                             const uint32_t (&a)[4],
                                             uint64_t b) {
  static_assert(kMmaTokens<kTokens>);
#if __CUDA_ARCH_FEAT_SM90_ALL
  NIBBLE_FRESH(4, 8)
  NIBBLE_FRESH(8, 16)
  NIBBLE_FRESH(16, 32)
  NIBBLE_FRESH(32, 64)
  NIBBLE_FRESH(48, 96)
  NIBBLE_FRESH(64, 128)
#endif
}

#undef NIBBLE_FRESH

}  // namespace nibble::cuda::ptx
