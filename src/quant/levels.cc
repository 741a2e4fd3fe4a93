#include "quant/levels.h"

#include <cmath>
#include <limits>
#include <span>

#include "base/check.h"

namespace nibble {
namespace {

constexpr float kLeastScale = std::numeric_limits<float>::min();  // else products lose bits

bool is_multiple(float scale, float measure) {
  const float steps = std::nearbyint(scale / measure);
  return steps <= kMostLevel && steps * measure == scale;
}

/// The largest number that all scales are multiples of; 0 where one is not positive.
float measure_of(std::span<const float> scales) {
  float measure = 0;
  for (const float scale : scales) {
    if (!(scale > 0) || !std::isfinite(scale)) {
      return 0;
    }
    if (measure == 0 || !is_multiple(scale, measure)) {
      measure = common_measure(scale, measure, [](float a, float b) { return std::fmod(a, b); });
    }
  }
  return measure;
}

}  // namespace

RowLevels levels_of(const QuantView& weight, int64_t row) {
  CHECK(weight.zeros != nullptr);
  const auto groups = static_cast<size_t>(weight.format.groups(weight.k));
  const int64_t first = row * static_cast<int64_t>(groups);
  std::vector<float> scales(groups);
  weight.read_scales(first, scales);
  RowLevels levels{measure_of(scales), std::vector<uint8_t>(groups)};
  for (size_t g = 0; g < groups && levels.channel != 0; ++g) {
    const int zero = weight.zeros[first + static_cast<int64_t>(g)];
    const float step = scales[g] / levels.channel;  // exact
    const bool is_code = zero >= kLowestCode && zero <= kHighestCode;
    if (levels.channel < kLeastScale || !is_code || step > static_cast<float>(most_step(zero))) {
      return {};
    }
    levels.steps[g] = static_cast<uint8_t>(step);
  }
  return levels;
}

Status check_levels(const QuantView& weight) {
  for (int64_t row = 0; row < weight.n; ++row) {
    if (levels_of(weight, row).channel == 0) {
      return make_error(StatusCode::kUnsupported,
                        "{}: the group scales of row {} are no small integers times one number, "
                        "as int8 activations need them; quantize the model again: nibble quantize "
                        "SRC DST --scheme NAME",
                        weight.name, row);
    }
  }
  return {};
}

}  // namespace nibble
