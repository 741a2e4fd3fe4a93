#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/kernels/rows/activations.cuh"
#include "backend/cuda/kernels/rows/common.cuh"

namespace nibble::cuda {

/// What eight elements from `i` on of a row become.
template <GemmInput::Kind kKind, ActFormat kFormat>
__device__ __forceinline__ F32x8 activated(const ActivationArgs& args, int64_t row, int64_t i) {
  using Kind = GemmInput::Kind;
  const auto* x = static_cast<const __nv_bfloat16*>(args.x) + row * args.stride;
  const F32x8 first = load_bf16x8(x + i);
  F32x8 y;
  if constexpr (kKind == Kind::kSiluMul) {
    y = load_bf16x8(x + args.n + i);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      y.v[j] *= silu<kKind, kFormat>(first.v[j], first.v[j]);
    }
  } else if constexpr (kKind == Kind::kClampedSwiglu) {
    y = load_bf16x8(x + args.n + i);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      y.v[j] = clamped_swiglu<kFormat>(first.v[j], y.v[j], args.limit);
    }
  } else if constexpr (kKind == Kind::kGeluTanh) {
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      y.v[j] = gelu_tanh(first.v[j]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      y.v[j] = first.v[j] < 0.0F ? 0.0F : first.v[j];  // NaN stays
    }
  }
  return y;
}

}  // namespace nibble::cuda
