#include "quantizer/encoders/int_scales.h"

#include <cmath>
#include <limits>

#include "base/f16.h"

namespace nibble {
namespace {

constexpr float kZeroScaleF32 = 0x1p-23F;
constexpr float kZeroScaleBf16 = 0x1p-7F;
// Below this the quotients overflow and the scale would round to zero.
constexpr float kVanishing = 1e3F * std::numeric_limits<float>::min();

float in_storage(DType dtype, float scale) {
  return dtype == DType::kBF16 ? bf16_to_f32(f32_to_bf16(scale)) : scale;
}

}  // namespace

float zero_scale(DType scale_dtype) {
  return scale_dtype == DType::kBF16 ? kZeroScaleBf16 : kZeroScaleF32;
}

bool vanishes(float absmax) { return absmax < kVanishing; }

float stored_scale(DType scale_dtype, float scale, float steps) {
  constexpr float kShrink = 0.99F;
  float stored = in_storage(scale_dtype, scale);
  while (!std::isfinite(stored * steps)) {
    scale *= kShrink;
    stored = in_storage(scale_dtype, scale);
  }
  return stored;
}

ScaleRule resolve_rule(ScaleRule rule, const WeightFormat& format) {
  if (rule != ScaleRule::kBest) {
    return rule;
  }
  const bool grouped = format.scale_per == ScalePer::kGroup;
  if (format.code != WeightCode::kInt4) {
    return ScaleRule::kAbsMax;
  }
  return grouped ? ScaleRule::kLsqSigned : ScaleRule::kMse;
}

void int_scales(const rows::RowKernels& kernels,
                const WeightFormat& format,
                ScaleRule rule,
                const rows::SearchArgs& args,
                float* scales) {
  float low[rows::kMostGroups];
  float high[rows::kMostGroups];
  switch (rule) {
    case ScaleRule::kLsq:
      kernels.lsq(args, scales);
      break;
    case ScaleRule::kLsqSigned:
      kernels.lsq_signed(args, scales);
      break;
    case ScaleRule::kMse:
      kernels.mse(args, scales);
      break;
    case ScaleRule::kSigned:
      kernels.minmax(args.x, args.groups, args.width, low, high);
      for (int64_t g = 0; g < args.groups; ++g) {
        scales[g] = args.absmax[g] / (low[g] == -args.absmax[g] ? -args.low : args.low);
      }
      break;
    case ScaleRule::kAbsMaxHalf:
      for (int64_t g = 0; g < args.groups; ++g) {
        scales[g] = args.absmax[g] / (args.high + 0.5F);
      }
      break;
    default:
      for (int64_t g = 0; g < args.groups; ++g) {
        scales[g] = args.absmax[g] / args.high;
      }
      break;
  }
  for (int64_t g = 0; g < args.groups; ++g) {
    scales[g] = vanishes(args.absmax[g]) ? zero_scale(format.scale_dtype)
                                         : stored_scale(format.scale_dtype, scales[g], args.low);
  }
}

}  // namespace nibble
