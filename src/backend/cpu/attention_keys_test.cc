#include "backend/cpu/simd/simd_scalar.h"
// The vocabulary comes first.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>

#include <gtest/gtest.h>

#include "backend/cpu/kernels/attention_keys.h"

namespace nibble::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One key of a vector.
struct Key {
  float unit;
  int32_t codes[16] = {};

  Key(float scale, float offset) {
    float scales[16] = {1.0F, kNan, -kInfinity};  // others must not matter
    float offsets[16] = {};
    scales[5] = scale;
    offsets[5] = offset;
    const KeyCodes key(Simd::load(scales), Simd::load(offsets));
    float units[16];
    Simd::store(units, key.unit);
    unit = units[5];
    for (int32_t c = 0; c < 16; ++c) {
      int32_t numbers[16];
      Simd::store_int(numbers, Simd::steps_s16(Simd::set_int(c | c << 16), key.step, key.start));
      codes[c] = static_cast<int16_t>(numbers[5]);
      EXPECT_EQ(numbers[5] >> 16, codes[c]);
    }
  }
};

void expect_nearest(float scale, float offset) {
  SCOPED_TRACE(testing::Message() << "scale " << scale << ", offset " << offset);
  const double last = 15.0 * scale + offset;
  const double largest = std::max({std::fabs(last), std::fabs(double{offset}), 0x1p-100});
  const Key key(scale, offset);
  ASSERT_NEAR(key.unit * 127.0 / largest, 1.0, 1e-6);
  int32_t most = 0;
  for (int32_t c = 0; c < 16; ++c) {
    const double exact = (double{scale} * c + offset) * 127.0 / largest;
    ASSERT_LE(std::fabs(key.codes[c] - exact), 0.54) << "code " << c;
    most = std::max(most, std::abs(key.codes[c]));
  }
  ASSERT_EQ(most, largest > 0x1p-100 ? 127 : most);
  ASSERT_LE(most, 127);
}

TEST(AttentionKeys, AreTheNearestWholeNumbersOfA127thOfTheLargest) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  for (int i = 0; i < 2000; ++i) {
    expect_nearest(std::exp(3.0F * normal(random)), 10.0F * normal(random));
  }
  for (const float scale : {0.0F, 1e-38F, 1e-28F, 1.0F, 1e30F}) {
    for (const float offset : {0.0F, -7.5F * scale, -15.0F * scale, 100.0F * scale, 3.0F, -1e30F}) {
      expect_nearest(scale, offset);
    }
  }
}

TEST(AttentionKeys, ThatAreNotFiniteHaveNoUnit) {
  const float pairs[][2] = {{kNan, 1.0F},      {1.0F, kNan},       {kInfinity, 1.0F},
                            {1.0F, kInfinity}, {1.0F, -kInfinity}, {kInfinity, -kInfinity},
                            {3e38F, 0.0F}};
  for (const auto& pair : pairs) {
    const Key key(pair[0], pair[1]);
    EXPECT_TRUE(std::isnan(key.unit));
    for (const int32_t code : key.codes) {
      EXPECT_EQ(code, 0);
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
