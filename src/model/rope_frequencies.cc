#include "model/rope_frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "arch/llama3_rope.h"

namespace nibble {

namespace {

constexpr double kTwoPi = 2.0 * std::numbers::pi;

/// The blend of YaRN runs over the index of the pair, between the pairs that turn beta_fast and
/// beta_slow times within the original context.
struct YarnRamp {
  double low = 0;
  double high = 0;

  YarnRamp(const RopeConfig& config, int64_t head_dim) {
    const auto dim = static_cast<double>(head_dim);
    const auto pair_with_turns = [&](double turns) {
      const double original = static_cast<double>(config.original_max_position);
      return dim * std::log(original / (turns * kTwoPi)) / (2.0 * std::log(config.theta));
    };
    low = pair_with_turns(config.beta_fast);
    high = pair_with_turns(config.beta_slow);
    if (config.truncate) {
      low = std::floor(low);
      high = std::ceil(high);
    }
    low = std::max(low, 0.0);
    high = std::min(high, dim - 1.0);
    high += low == high ? 0.001 : 0.0;
  }

  [[nodiscard]] double frequency(double plain, int64_t pair, double factor) const {
    const double stretch = std::clamp((static_cast<double>(pair) - low) / (high - low), 0.0, 1.0);
    return plain / factor * stretch + plain * (1.0 - stretch);
  }
};

}  // namespace

RopeFrequencies compute_rope_frequencies(const RopeConfig& config, int64_t head_dim) {
  RopeFrequencies table;
  const YarnRamp ramp(config, head_dim);
  for (int64_t pair = 0; pair < head_dim / 2; ++pair) {
    const double exponent = 2.0 * static_cast<double>(pair) / static_cast<double>(head_dim);
    double frequency = std::pow(config.theta, -exponent);
    if (config.kind == RopeKind::kLinear) {
      frequency /= config.factor;
    } else if (config.kind == RopeKind::kLlama3) {
      frequency = llama3_frequency(frequency, config);
    } else if (config.kind == RopeKind::kYarn) {
      frequency = ramp.frequency(frequency, pair, config.factor);
    } else if (config.kind == RopeKind::kNone) {
      frequency = 0.0;  // a rotation that leaves everything as it is
    }
    table.inv_freq.push_back(static_cast<float>(frequency));
  }
  if (config.kind == RopeKind::kDynamicNtk) {
    table.dynamic = {.original = config.original_max_position, .factor = config.factor};
  }
  if (config.kind == RopeKind::kYarn) {
    table.attention_factor = static_cast<float>(config.attention_factor);
  }
  return table;
}

}  // namespace nibble
