#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "bench/client/load_run.h"

namespace nibble {

enum class RampUp : uint8_t { kNone, kLinear, kExponential };

/// When requests are sent.
struct ArrivalOptions {
  double rate = std::numeric_limits<double>::infinity();  // requests/s; infinity: all at once
  double burstiness = 1;  // shape of the gamma distribution of the gaps; 1: a Poisson process
  RampUp ramp_up = RampUp::kNone;
  double ramp_start = 0;  // requests/s of the first and of the last request
  double ramp_end = 0;
  uint64_t seed = 0;
};

/// Seconds since the start at which each of `count` requests is sent, ascending; empty when all are
/// sent at once. kVllm: the gaps are scaled so that the last request comes at count / rate, unless
/// the rate ramps up. kSglang: exponential gaps as they are drawn, the first request at 0.
[[nodiscard]] std::vector<double> arrival_times(int64_t count,
                                                const ArrivalOptions& options,
                                                LoadTiming timing);

}  // namespace nibble
