#include "quantizer/encoders/int_scales.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace nibble {
namespace {

// Of what the searches take as it is.
constexpr float kSearchLow = 0x1p-100F;
constexpr float kSearchHigh = 0x1p100F;

bool out_of_range(float absmax) {
  return !vanishes(absmax) && (absmax < kSearchLow || absmax > kSearchHigh);
}

using Search = rows::RowKernels::Search;

/// Searches weights that are too large or small after making them numbers near 1, by powers of two.
void search_scaled(Search search, const rows::SearchArgs& args, float* scales) {
  std::vector<float> x(args.x, args.x + args.groups * args.width);
  float absmax[rows::kMostGroups];
  int exponents[rows::kMostGroups];
  for (int64_t g = 0; g < args.groups; ++g) {
    absmax[g] = std::frexp(args.absmax[g], &exponents[g]);
    for (int64_t i = g * args.width; i < (g + 1) * args.width; ++i) {
      float& value = x[static_cast<size_t>(i)];
      value = std::ldexp(value, -exponents[g]);
    }
  }
  rows::SearchArgs scaled = args;
  scaled.x = x.data();
  scaled.absmax = absmax;
  search(scaled, scales);
  for (int64_t g = 0; g < args.groups; ++g) {
    scales[g] = std::ldexp(scales[g], exponents[g]);
  }
}

void run_search(Search search, const rows::SearchArgs& args, float* scales) {
  const bool scaled = std::any_of(args.absmax, args.absmax + args.groups, out_of_range);
  scaled ? search_scaled(search, args, scales) : search(args, scales);
}

/// Scales as they are stored; false when one of them is out of the ordinary.
bool store_ordinary(DType dtype, const rows::SearchArgs& args, const float* scales, float* stored) {
  int odd = 0;
  for (int64_t g = 0; g < args.groups; ++g) {
    stored[g] = dtype == DType::kBF16 ? bf16_to_f32(f32_to_bf16(scales[g])) : scales[g];
    odd |=
        static_cast<int>(vanishes(args.absmax[g])) |
        static_cast<int>(!(std::fabs(stored[g] * args.low) <= std::numeric_limits<float>::max()));
  }
  return odd == 0;
}

}  // namespace

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
      run_search(kernels.lsq, args, scales);
      break;
    case ScaleRule::kLsqSigned:
      run_search(kernels.lsq_signed, args, scales);
      break;
    case ScaleRule::kMse:
      run_search(kernels.mse, args, scales);
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
  float stored[rows::kMostGroups];
  if (store_ordinary(format.scale_dtype, args, scales, stored)) {
    std::copy_n(stored, args.groups, scales);
    return;
  }
  for (int64_t g = 0; g < args.groups; ++g) {
    scales[g] = vanishes(args.absmax[g]) ? zero_scale(format.scale_dtype)
                                         : stored_scale(format.scale_dtype, scales[g], args.low);
  }
}

}  // namespace nibble
