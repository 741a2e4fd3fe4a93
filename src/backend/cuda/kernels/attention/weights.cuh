#pragma once

// Weights of AttentionForm::kShared: the bits that the CPU's weight_of() gives
// (src/backend/cpu/kernels/attention_state.h).

#include <cstdint>

#include "backend/cuda/kernels/attention/plan.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "ops/attention_form.h"

namespace nibble::cuda {

/// 2^x, -96 <= x <= 100, with the CPU's bits (SinkForm).
__device__ __forceinline__ float sink_exp2(float x) {
  const float n = __fadd_rn(x, SinkForm::kShift);
  const float f = __fsub_rn(x, __fsub_rn(n, SinkForm::kShift));
  float p = __fmaf_rn(SinkForm::kQuartic, f, SinkForm::kCubic);
  p = __fmaf_rn(p, f, SinkForm::kQuadratic);
  p = __fmaf_rn(p, f, SinkForm::kLinear);
  p = __fmaf_rn(p, f, 1.0F);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(n) << 23));
}

/// What the sink of a query head adds to the weights of a row whose top is 2^top: a key without a
/// value, with the CPU's bits (SinkForm).
__device__ __forceinline__ float sink_weight(const PagedArgs& args, int64_t head, float top) {
  if (args.sinks == nullptr) {
    return 0.0F;
  }
  const float exponent = __fmul_rn(args.sinks[head], SinkForm::kLog2E);
  const float x = fminf(fmaxf(exponent, -SinkForm::kLargest), SinkForm::kLargest);
  const float n = __fsub_rn(__fadd_rn(x, SinkForm::kShift), SinkForm::kShift);
  const float above = fmaxf(kLeastLog2, fminf(__fsub_rn(n, top), SinkForm::kMost));
  return __fmul_rn(sink_exp2(__fsub_rn(x, n)), sink_exp2(above));
}

/// The larger; NaN if one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result = 0.0F;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

/// The whole power of two that weights are relative to, from a row's largest score in these units.
/// A NaN is left out: who meets one has to spoil the row's sum.
__device__ __forceinline__ float raised_top(float top, float largest, float factor) {
  return fmaxf(top, ceilf(__fmul_rn(largest, factor)));
}

/// 2^(exponent - WeightForm::kBase), 2^-96 for what is less.
__device__ __forceinline__ float shared_weight(float exponent) {
  using Form = WeightForm;
  const uint32_t x = __float_as_uint(fmaxf(exponent, Form::kLeast)) << 8;
  const float m = __uint_as_float((x & 0x7fffffU) | 0x3f800000U);
  float p = __fmaf_rn(Form::kCubic, m, Form::kQuadratic);
  p = __fmaf_rn(p, m, Form::kLinear);
  p = __fmaf_rn(p, m, Form::kConstant);
  return __uint_as_float(x + __float_as_uint(p));
}

/// Two weights as BF16 numbers.
__device__ __forceinline__ void round_pair(float& a, float& b) {
  const uint32_t pair = ptx::pack_bf16(a, b);
  a = __uint_as_float(pair << 16);
  b = __uint_as_float(pair & 0xffff0000U);
}

}  // namespace nibble::cuda
