#pragma once

#include <cstdint>
#include <vector>

#include "base/f16.h"

namespace nibble {

inline std::vector<uint16_t> to_bf16(const std::vector<float>& x) {
  std::vector<uint16_t> y;
  y.reserve(x.size());
  for (const float value : x) {
    y.push_back(f32_to_bf16(value));
  }
  return y;
}

/// Rounds numbers where they are, too.
inline std::vector<uint16_t> round_to_bf16(std::vector<float>& x) {
  std::vector<uint16_t> y = to_bf16(x);
  for (size_t i = 0; i < y.size(); ++i) {
    x[i] = bf16_to_f32(y[i]);
  }
  return y;
}

inline std::vector<float> to_f32(const std::vector<uint16_t>& x) {
  std::vector<float> y;
  y.reserve(x.size());
  for (const uint16_t value : x) {
    y.push_back(bf16_to_f32(value));
  }
  return y;
}

}  // namespace nibble
