#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/kernels/rows/activations.cuh"
#include "backend/cuda/kernels/rows/common.cuh"

namespace nibble::cuda {

/// What eight elements become: of a row, or of its gates and ups.
template <GemmInput::Kind kKind, ActFormat kFormat>
__device__ __forceinline__ F32x8 activation_of(const ActivationArgs& args,
                                               const F32x8& first,
                                               const F32x8& second) {
  using Kind = GemmInput::Kind;
  F32x8 y;
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    const float x = first.v[j];
    if constexpr (kKind == Kind::kSiluMul) {
      y.v[j] = second.v[j] * silu<kKind, kFormat>(x, x);
    } else if constexpr (kKind == Kind::kClampedSwiglu) {
      y.v[j] = clamped_swiglu<kFormat>(x, second.v[j], args.limit);
    } else if constexpr (kKind == Kind::kGeluTanh) {
      y.v[j] = gelu_tanh(x);
    } else {
      y.v[j] = x < 0.0F ? 0.0F : x;  // NaN stays
    }
  }
  return y;
}

/// What eight elements from `i` on of a row become.
template <GemmInput::Kind kKind, ActFormat kFormat>
__device__ __forceinline__ F32x8 activated(const ActivationArgs& args, int64_t row, int64_t i) {
  const auto* x = static_cast<const __nv_bfloat16*>(args.x) + row * args.stride;
  const F32x8 first = load_bf16x8(x + i);
  if constexpr (has_gate(kKind)) {
    return activation_of<kKind, kFormat>(args, first, load_bf16x8(x + args.n + i));
  } else {
    return activation_of<kKind, kFormat>(args, first, first);
  }
}

/// The same of the elements that `columns` [8] names.
template <GemmInput::Kind kKind, ActFormat kFormat>
__device__ __forceinline__ F32x8 activated_columns(const ActivationArgs& args,
                                                   int64_t row,
                                                   const int32_t* columns) {
  const auto* x = static_cast<const __nv_bfloat16*>(args.x) + row * args.stride;
  F32x8 first;
  F32x8 second;
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    const int32_t column = __ldg(columns + j);
    first.v[j] = __bfloat162float(x[column]);
    second.v[j] = has_gate(kKind) ? __bfloat162float(x[args.n + column]) : 0.0F;
  }
  return activation_of<kKind, kFormat>(args, first, second);
}

}  // namespace nibble::cuda
