#include "backend/cpu/simd/simd_scalar.h"
// The vocabulary comes first.
#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "backend/cpu/kernels/attention_exponents.h"

namespace nibble::cpu {
namespace {

using Range = ExponentRange<2>;
constexpr double kUnit = 0x1p45;  // what all weights have too much

/// The weight of 2^x times the scale.
double weight_of_scale(double x, float scale) {
  const F32x16 exponent = Simd::set(static_cast<float>(Range::kBase + x));
  float lanes[16];
  Simd::store(lanes, code_weight(exponent, code_scale(Simd::set(scale))));
  return lanes[0];
}

TEST(AttentionWeights, OfCodesAreExactForPowersOfTwo) {
  for (int x = -96; x < 32; ++x) {
    for (int s = -52; s < 26; ++s) {
      EXPECT_EQ(weight_of_scale(x, std::ldexp(1.0F, s)), std::ldexp(kUnit, x + s)) << x << " " << s;
    }
  }
}

TEST(AttentionWeights, OfCodesAreCloseEverywhere) {
  double largest = 0.0;
  double squares = 0.0;
  double sum = 0.0;
  constexpr int kCount = 12426;  // steps that hit no multiple of 2^-7 again and again
  for (int i = 0; i < kCount; ++i) {
    const double x = -96.0 + 0.0103 * i;
    const double ratio = weight_of_scale(x, 1.0F) / (kUnit * std::exp2(x)) - 1.0;
    largest = std::fmax(largest, std::fabs(ratio));
    squares += ratio * ratio;
    sum += ratio;
  }
  EXPECT_LT(largest, 0.0067);
  EXPECT_GT(largest, 0.005);  // BF16 has no more places
  EXPECT_LT(std::sqrt(squares / kCount), 0.0024);
  EXPECT_LT(std::fabs(sum / kCount), 0.0003);
}

TEST(AttentionWeights, OfCodesTakeScalesIn) {
  for (int i = 0; i < 7271; ++i) {
    const double s = -51.9 + 0.0107 * i;
    const auto scale = static_cast<float>(std::exp2(s));
    EXPECT_NEAR(weight_of_scale(-1.25, scale) / (kUnit * std::exp2(-1.25) * scale), 1.0, 0.0095)
        << s;
  }
}

TEST(AttentionWeights, OfCodesAreNormalNumbersAtTheEnds) {
  const float last = std::nextafter(CodeWeightForm::kScaleLimit, 0.0F);
  EXPECT_EQ(weight_of_scale(-96.0, CodeWeightForm::kLeastScale), 0x1p-103);
  EXPECT_LE(weight_of_scale(32.0 - Range::kUnit, last), 0x1p103);
}

TEST(AttentionWeights, ExponentsOfAllCachesShareTheirBitsAbove) {
  const auto bits = [](float x) { return std::bit_cast<uint32_t>(x); };
  EXPECT_EQ(bits(ExponentRange<1>::kLeast) >> 22, bits(ExponentRange<1>::kTop) >> 22);
  EXPECT_EQ(bits(Range::kLeast) >> 14, bits(Range::kTop) >> 14);
  EXPECT_EQ(bits(Range::kLeast) & 0xffffU, 0U);
}

// CPU and GPU, and a CPU from piece to piece, have tops that are some powers of two apart.
TEST(AttentionWeights, OfSinksDifferByPowersOfTwoBetweenTops) {
  for (int i = 0; i < 4001; ++i) {
    const float sink = -30.0F + 0.015F * static_cast<float>(i);
    const double exponent = static_cast<double>(sink) * std::log2(std::exp(1.0));
    const float weight = sink_weight(sink, 0.0F);
    EXPECT_NEAR(weight / std::exp2(exponent), 1.0, 1e-5) << sink;
    for (const int top : {-40, -1, 1, 3, 17, 50}) {
      EXPECT_EQ(sink_weight(sink, static_cast<float>(top)), std::ldexp(weight, -top)) << sink;
    }
    EXPECT_NEAR(sink_weight(sink, 0.3F) / std::exp2(exponent - 0.3), 1.0, 1e-5) << sink;
  }
}

TEST(AttentionWeights, OfAnySinkAreFiniteAndNormal) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float sink : {-kInfinity, -3e38F, -2e6F, -500.0F, 500.0F, 2e6F, 3e38F, kInfinity}) {
    for (const float top : {-3.4e38F, -1e6F, -3.0F, 0.0F, 0.25F, 1e6F}) {
      const float weight = sink_weight(sink, top);
      EXPECT_GE(weight, 0x1p-97F) << sink << " " << top;
      EXPECT_LE(weight, 0x1p101F) << sink << " " << top;
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
