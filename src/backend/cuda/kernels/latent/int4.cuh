#pragma once

// Latents in 4 bits on sm_90a: codes become fp16, times their group's scale plus its offset.

#include <cuda_fp16.h>

#include "backend/cuda/kernels/latent/codes.cuh"

namespace nibble::cuda {

constexpr int kInt4Group = 128;  // numbers that share a scale and an offset

/// Four pairs of codes of a word, times a scale plus an offset: codes i and i + 4 of the word.
__device__ __forceinline__ void widen_int4(uint32_t codes,
                                           uint32_t scale,
                                           uint32_t offset,
                                           uint32_t (&pairs)[4]) {
  const __half2 bias = __halves2half2(__ushort_as_half(0x6400), __ushort_as_half(0x6400));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // (codes & mask) | 1024 in fp16
    const uint32_t biased = ptx::lop3<0xea>(codes >> (4 * i), 0x000f000fU, 0x64006400U);
    const __half2 code = __hsub2(*reinterpret_cast<const __half2*>(&biased), bias);
    const __half2 value = __hfma2(code, *reinterpret_cast<const __half2*>(&scale),
                                  *reinterpret_cast<const __half2*>(&offset));
    pairs[i] = *reinterpret_cast<const uint32_t*>(&value);
  }
}

}  // namespace nibble::cuda
