#include "base/f16.h"

#include <cmath>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

namespace nibble {
namespace {

// Oracle: the two neighbours of x among all finite values of the type, by exhaustive search.
template <typename Decode>
uint16_t nearest_even(float x, Decode decode) {
  uint16_t best = 0;
  double best_error = INFINITY;
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float value = decode(static_cast<uint16_t>(code));
    if (!std::isfinite(value) || std::signbit(value) != std::signbit(x)) {
      continue;
    }
    const double error = std::fabs(static_cast<double>(value) - static_cast<double>(x));
    if (error < best_error || (error == best_error && (code & 1U) == 0)) {
      best_error = error;
      best = static_cast<uint16_t>(code);
    }
  }
  return best;
}

TEST(F16, EveryCodeRoundTrips) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const float value = f16_to_f32(static_cast<uint16_t>(code));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(f16_to_f32(f32_to_f16(value))));
      EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(value))));
    } else {
      EXPECT_EQ(f32_to_f16(value), code);
    }
    const float wide = bf16_to_f32(static_cast<uint16_t>(code));
    if (!std::isnan(wide)) {
      EXPECT_EQ(f32_to_bf16(wide), code);
    }
  }
}

TEST(F16, RoundsToNearestEven) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  for (const float scale : {1.0F, 1e-5F, 3e-8F, 1e4F}) {
    for (int i = 0; i < 30; ++i) {
      const float x = normal(random) * scale;
      EXPECT_EQ(f32_to_f16(x), nearest_even(x, f16_to_f32)) << x;
      EXPECT_EQ(f32_to_bf16(x), nearest_even(x, bf16_to_f32)) << x;
    }
  }
  EXPECT_EQ(f32_to_f16(65520.0F), 0x7c00);
  EXPECT_EQ(f32_to_f16(65519.0F), 0x7bff);
}

}  // namespace
}  // namespace nibble
