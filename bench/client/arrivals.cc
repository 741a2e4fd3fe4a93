#include "bench/client/arrivals.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace nibble {
namespace {

double rate_of(const ArrivalOptions& options, int64_t i, int64_t count) {
  const double progress =
      static_cast<double>(i) / static_cast<double>(std::max<int64_t>(count - 1, 1));
  switch (options.ramp_up) {
    case RampUp::kLinear:
      return options.ramp_start + (options.ramp_end - options.ramp_start) * progress;
    case RampUp::kExponential:
      return options.ramp_start * std::pow(options.ramp_end / options.ramp_start, progress);
    default:
      return options.rate;
  }
}

}  // namespace

std::vector<double> arrival_times(int64_t count, const ArrivalOptions& options, LoadTiming timing) {
  const bool ramps = options.ramp_up != RampUp::kNone;
  if (count <= 0 || (!ramps && std::isinf(options.rate))) {
    return {};
  }
  std::mt19937_64 random(options.seed);
  std::vector<double> times(static_cast<size_t>(count));
  double at = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double rate = rate_of(options, i, count);
    std::gamma_distribution<double> gap(options.burstiness, 1 / (rate * options.burstiness));
    const double next = at + (std::isinf(options.burstiness) ? 1 / rate : gap(random));
    times[static_cast<size_t>(i)] = timing == LoadTiming::kSglang && !ramps ? at : next;
    at = next;
  }
  if (timing == LoadTiming::kVllm && !ramps && times.back() > 0) {
    const double scale = static_cast<double>(count) / options.rate / times.back();
    for (double& time : times) {
      time *= scale;
    }
  }
  return times;
}

}  // namespace nibble
