#include "ops/dynamic_rope.h"

#include <cmath>

#include <gtest/gtest.h>

namespace nibble {
namespace {

/// As transformers writes it (_compute_dynamic_ntk_parameters), in double precision.
double frequency_of(
    double theta, double factor, double original, double length, int i, double dim) {
  const double base =
      theta * std::pow(factor * length / original - (factor - 1.0), dim / (dim - 2.0));
  return 1.0 / std::pow(base, 2.0 * i / dim);
}

TEST(DynamicRope, FrequenciesAreThoseOfTheLargerBase) {
  for (const int64_t dim : {16, 64, 128, 256}) {
    for (const double factor : {1.0, 2.0, 2.5, 8.0}) {
      const DynamicRope rope{.original = 4096, .factor = factor};
      for (const int64_t length : {4097, 5000, 32768}) {
        for (int i = 0; i < dim / 2; ++i) {
          const auto plain = static_cast<float>(std::pow(1e6, -2.0 * i / static_cast<double>(dim)));
          const float grown = grown_frequency(plain, base_growth(rope, length), i, dim);
          const double expected = frequency_of(1e6, factor, 4096.0, static_cast<double>(length), i,
                                               static_cast<double>(dim));
          ASSERT_NEAR(grown, expected, 1.3e-7 * expected) << dim << " " << length << " " << i;
        }
      }
    }
  }
}

TEST(DynamicRope, NothingGrowsUpToTheOriginalLength) {
  const DynamicRope rope{.original = 64, .factor = 8.0};
  EXPECT_EQ(base_growth(rope, 1), 1.0);
  EXPECT_EQ(base_growth(rope, 64), 1.0);
  EXPECT_GT(base_growth(rope, 65), 1.0);
  EXPECT_EQ(base_growth(DynamicRope{}, 1 << 20), 1.0);
}

TEST(DynamicRope, PromptsAreWholeAndTokensTheLastOfTheirs) {
  EXPECT_EQ(rotated_length(100, 0), 100);
  EXPECT_EQ(rotated_length(100, 99), 100);
  EXPECT_EQ(rotated_length(100, 100), 101);
  EXPECT_EQ(rotated_length(0, 7), 8);
}

}  // namespace
}  // namespace nibble
