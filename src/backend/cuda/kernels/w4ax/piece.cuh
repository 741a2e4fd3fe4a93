#pragma once

#include <cstdint>

#include "backend/cuda/ptx/memory.cuh"

// Weights of the products with 4- and 8-bit activations (w4ax/wide.cuh, few.cuh): pieces of 32
// rows x 128 of K, all pieces of the same rows behind each other. A piece holds for each 16 of its
// rows and half of its K a word of 16 bytes for each lane of a warp, so that the fragments of both
// kinds of matrix instruction are loaded as they lie; then the BF16 scales of its rows, for each
// block of K.
namespace nibble::cuda {

/// kSubs: blocks of activations in 128 of K.
template <int kSubs_>
struct W4AxForm {
  static constexpr int kSubs = kSubs_;
  static constexpr int kCodeBytes = 2048;
  static constexpr int kPieceBytes = kCodeBytes + kSubs * 64;
};

/// K blocks of 128 are filled up to a multiple of it.
inline constexpr int kW4AxBlocksTogether = 4;

/// A thread's codes of 16 rows: K steps 0 and 1, then 2 and 3.
struct W4AxWords {
  uint4 halves[2];
  /// piece: address in shared memory; half: rows 0 to 15 or 16 to 31.
  static __device__ __forceinline__ W4AxWords fetch(uint32_t piece, int half, int lane) {
    const uint32_t at = piece + half * 1024 + lane * 16;
    return {{ptx::load_shared16(at), ptx::load_shared16(at + 512)}};
  }
  /// To INT8 operands 16 times as large, the low nibbles for even channels (COMET, section 4: zero
  /// extension by position).
  __device__ __forceinline__ void expand(uint32_t (&a)[4][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 q = halves[half];
      const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t* to = a[2 * half + w / 2] + 2 * (w % 2);
        to[0] = (words[w] << 4) & 0xf0f0f0f0U;
        to[1] = words[w] & 0xf0f0f0f0U;
      }
    }
  }
};

/// Scales of two neighbouring channels from two BF16, a sixteenth of them: operands are 16 times
/// the codes.
__device__ __forceinline__ float2 w4ax_scales(uint32_t two) {
  return {__uint_as_float(two << 16) * 0.0625F, __uint_as_float(two & 0xffff0000U) * 0.0625F};
}

/// One block's sum added in the order that every device keeps.
__device__ __forceinline__ float w4ax_add(int32_t sum,
                                          float weight_scale,
                                          float x_scale,
                                          float to) {
  return __fmaf_rn(static_cast<float>(sum), __fmul_rn(x_scale, weight_scale), to);
}

}  // namespace nibble::cuda
