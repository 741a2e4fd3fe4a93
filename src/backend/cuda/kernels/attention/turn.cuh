#pragma once

#include "backend/cuda/kernels/attention/kv_forms.cuh"
#include "quant/hadamard.h"

// hadamard() of a head that a warp holds, with the CPU's bits.
namespace nibble::cuda {

template <int kDim>
struct HeadTurn {
  using Values = HeadValues<kDim>;
  static constexpr int kEach = Values::kEach, kLanes = Values::kLanes;
  static_assert(hadamard_block(kDim) == kDim);

  static __device__ __forceinline__ void flip_signs(Values& x, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int d = half * (kDim / 2) + lane * kEach + i;
        x.v[half][i] = (__popc(d & (d >> 1)) & 1) != 0 ? -x.v[half][i] : x.v[half][i];
      }
    }
  }

  static __device__ __forceinline__ void add_up(Values& x, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int distance = 1; distance < kEach; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if ((i & distance) == 0) {
            const float low = x.v[half][i], high = x.v[half][i + distance];
            x.v[half][i] = __fadd_rn(low, high);
            x.v[half][i + distance] = __fsub_rn(low, high);
          }
        }
      }
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          const float own = x.v[half][i];
          const float other = __shfl_xor_sync(~0U, own, distance);
          x.v[half][i] = (lane & distance) == 0 ? __fadd_rn(own, other) : __fsub_rn(other, own);
        }
      }
    }
    constexpr float kFactor = kDim == 64 ? 0.125F : kDim == 128 ? 0.08838834764831845F : 0.0625F;
    static_assert(kDim == 64 || kDim == 128 || kDim == 256);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float low = x.v[0][i], high = x.v[1][i];
      x.v[0][i] = __fmul_rn(__fadd_rn(low, high), kFactor);
      x.v[1][i] = __fmul_rn(__fsub_rn(low, high), kFactor);
    }
  }

  /// By all lanes of a warp.
  static __device__ __forceinline__ void turn(Values& x, int lane) {
    flip_signs(x, lane);
    add_up(x, lane);
  }
  static __device__ __forceinline__ void turn_back(Values& x, int lane) {
    add_up(x, lane);
    flip_signs(x, lane);
  }
};

}  // namespace nibble::cuda
