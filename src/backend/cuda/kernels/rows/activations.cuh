#pragma once

#include <cstdint>

#include "backend/cuda/kernels/quotient.cuh"
#include "core/gemm_input.h"
#include "ops/silu_form.h"
#include "quant/scheme.h"

// What activations make of one number, or of gate and up.
namespace nibble::cuda {

/// gate / (one + one * e^-power) within 1e-7: the power is corrected by what rounding its exponent
/// left out, the quotient by its remainder.
__device__ __forceinline__ float logistic(float gate, float power_of_e, float one) {
  constexpr float kLog2E = 1.44269504F;
  constexpr float kLog2ERest = 1.92596303e-8F;
  constexpr float kLn2 = 0.693147181F;
  const float x = fmaxf(power_of_e, -87.0F);  // the power stays finite
  const float exponent = __fmul_rn(x, -kLog2E);
  const float rest = __fmaf_rn(x, -kLog2ERest, __fmaf_rn(x, -kLog2E, -exponent));
  float power = 0.0F;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(exponent));
  const float divisor = __fmaf_rn(power, __fmaf_rn(rest, one * kLn2, one), one);
  float inverse = 0.0F;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
  return quotient(gate, divisor, inverse);
}

/// gate / (1 + e^-power) in the form of kFormat for an activation: silu where the power is the
/// gate. Its last places are the CPU's where bits are cut.
template <GemmInput::Kind kKind, ActFormat kFormat>
__device__ __forceinline__ float silu(float gate, float power) {
  constexpr SiluForm kForm = is_integer(kFormat) ? silu_of_int8(kKind) : SiluForm{};
  constexpr float kOne = 1.0F / kForm.factor;
  return __uint_as_float(__float_as_uint(logistic(gate, power, kOne)) & kForm.bits);
}

/// The product that gpt-oss makes of gate and up; NaN stays.
template <ActFormat kFormat>
__device__ __forceinline__ float clamped_swiglu(float gate, float up, float limit) {
  const float g = gate > limit ? limit : gate;
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  constexpr auto kKind = GemmInput::Kind::kClampedSwiglu;
  return __fmul_rn(silu<kKind, kFormat>(g, __fmul_rn(g, kSwigluAlpha)), __fadd_rn(u, 1.0F));
}

__device__ __forceinline__ float gelu_tanh(float x) {
  const float v = x < kLeastGelu ? kLeastGelu : x;  // NaN stays
  const float slope = __fmaf_rn(__fmul_rn(v, v), kGeluCubic, kGeluLinear);
  return logistic(v, fminf(__fmul_rn(v, slope), 100.0F), 1.0F);
}

}  // namespace nibble::cuda
