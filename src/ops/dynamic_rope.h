#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace nibble {

/// Dynamic NTK scaling: in a sequence longer than `original`, frequencies are those of a larger
/// base, the larger the longer. A token keeps the frequencies of the length that its sequence had
/// when generation first computed it: the prompt is computed whole, then each token as the last
/// one.
struct DynamicRope {
  int64_t original = 0;  // tokens up to which nothing is scaled; 0: nothing ever is
  double factor = 1.0;
};

/// The length whose frequencies the token at `position` has, however its sequence is cut into
/// steps.
[[nodiscard]] constexpr int64_t rotated_length(int64_t prompt_len, int64_t position) {
  return std::max(prompt_len, position + 1);
}

/// What the base grows by in a sequence of `length` tokens, to the power of (dim - 2) / dim.
[[nodiscard]] constexpr double base_growth(const DynamicRope& rope, int64_t length) {
  if (rope.original == 0 || length <= rope.original) {
    return 1.0;
  }
  return 1.0 + rope.factor * static_cast<double>(length - rope.original) /
                   static_cast<double>(rope.original);
}

/// The exponent of base_growth() in the frequency of a pair of channels of head_dim.
[[nodiscard]] constexpr double growth_exponent(int64_t pair, int64_t head_dim) {
  return -2.0 * static_cast<double>(pair) / static_cast<double>(head_dim - 2);
}

/// Frequency of a pair whose unscaled one is `plain`.
[[nodiscard]] inline float grown_frequency(float plain,
                                           double growth,
                                           int64_t pair,
                                           int64_t head_dim) {
  return static_cast<float>(plain * std::pow(growth, growth_exponent(pair, head_dim)));
}

}  // namespace nibble
