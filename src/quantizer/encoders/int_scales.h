#pragma once

#include <cmath>
#include <limits>

#include "base/f16.h"
#include "quant/codec.h"
#include "quant/scheme.h"
#include "quantizer/kernels/row_kernels.h"
#include "quantizer/rtn.h"

namespace nibble {

/// The scale of a group whose weights are all zero, or too small to be divided by: what
/// compressed-tensors stores, 2^-23 in F32 and 2^-7 in BF16.
[[nodiscard]] inline float zero_scale(DType scale_dtype) {
  return scale_dtype == DType::kBF16 ? 0x1p-7F : 0x1p-23F;
}

/// Whether a group of this largest magnitude counts as one of zeros: below it quotients overflow
/// and the scale would round to zero.
[[nodiscard]] inline bool vanishes(float absmax) {
  return absmax < 1e3F * std::numeric_limits<float>::min();
}

/// `scale` as it is stored, made smaller where `steps` times it would be infinite.
[[nodiscard]] inline float stored_scale(DType scale_dtype, float scale, float steps) {
  constexpr float kShrink = 0.99F;
  const auto stored = [&] {
    return scale_dtype == DType::kBF16 ? bf16_to_f32(f32_to_bf16(scale)) : scale;
  };
  while (!std::isfinite(stored() * steps)) {
    scale *= kShrink;
  }
  return stored();
}

/// The scale of FP8 codes whose largest magnitude is absmax.
[[nodiscard]] inline float fp8_scale(float absmax) {
  return vanishes(absmax) ? zero_scale(DType::kF32)
                          : stored_scale(DType::kF32, absmax / kE4M3Max, kE4M3Max);
}

/// The rule that "best" stands for.
[[nodiscard]] ScaleRule resolve_rule(ScaleRule rule, const WeightFormat& format);

/// Scales, as they are stored, of at most kMostGroups groups of integer codes without zero points.
///   rule    a resolved rule for such codes
///   x       [groups, width] finite, absmax [groups]
void int_scales(const rows::RowKernels& kernels,
                const WeightFormat& format,
                ScaleRule rule,
                const rows::SearchArgs& args,
                float* scales);

}  // namespace nibble
