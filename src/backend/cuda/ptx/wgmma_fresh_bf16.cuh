#pragma once

#include "backend/cuda/ptx/wgmma.cuh"

namespace nibble::cuda::ptx {

/// mma_shared() of BF16 for 128 tokens whose products replace what is in d.
__device__ __forceinline__ void mma_shared_fresh_bf16(float (&d)[64], uint64_t a, uint64_t b) {
#if __CUDA_ARCH_FEAT_SM90_ALL
  // clang-format off
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, 0, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"
               " {" NIBBLE_D64 "}," NIBBLE_S64 ",p,1,1,0,0;\n}"
               : NIBBLE_O64("+f", 0)
               : "l"(a), "l"(b));
  // clang-format on
#endif
}

}  // namespace nibble::cuda::ptx
