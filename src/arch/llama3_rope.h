#pragma once

#include <numbers>

#include "arch/config.h"

namespace nibble {

/// What Llama 3.1's scaling makes of a frequency, in radians per position: long wavelengths are
/// stretched by `factor`, short ones kept, with a linear blend between.
[[nodiscard]] inline double llama3_frequency(double frequency, const RopeConfig& config) {
  const double original = static_cast<double>(config.original_max_position);
  const double wavelength = 2.0 * std::numbers::pi / frequency;
  if (wavelength < original / config.high_freq_factor) {
    return frequency;
  }
  if (wavelength > original / config.low_freq_factor) {
    return frequency / config.factor;
  }
  const double keep = (original / wavelength - config.low_freq_factor) /
                      (config.high_freq_factor - config.low_freq_factor);
  return (1.0 - keep) * frequency / config.factor + keep * frequency;
}

}  // namespace nibble
