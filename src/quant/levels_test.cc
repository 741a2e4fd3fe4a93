#include "quant/levels.h"

#include <random>
#include <span>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "quant/quant_tensor.h"
#include "quant/testing/random_levels.h"

namespace nibble {
namespace {

using testing::HasSubstr;

constexpr WeightFormat kFormat{WeightCode::kInt4, ScalePer::kGroup, 64, DType::kBF16,
                               ZeroPoints::kPerScale};

/// A row with these scales and zero points.
QuantTensor row_of(std::span<const float> scales, std::span<const int8_t> zeros) {
  QuantTensor weight = QuantTensor::allocate(kFormat, 1, 64 * std::ssize(scales)).value();
  std::ranges::copy(scales, weight.scales.as<float>().begin());
  std::ranges::copy(zeros, weight.zeros.as<int8_t>().begin());
  return weight;
}

TEST(Levels, TheLargestStepLeavesEveryCodeWithinAnInt8) {
  for (int zero = kLowestCode; zero <= kHighestCode; ++zero) {
    const int most = most_step(zero);
    for (int code = kLowestCode; code <= kHighestCode; ++code) {
      EXPECT_LE(std::abs((code - zero) * most), 127) << zero;
    }
    EXPECT_GT((most + 1) * std::max(kHighestCode - zero, zero - kLowestCode), 127) << zero;
    EXPECT_TRUE(most >= 8 && most <= 15);
  }
}

TEST(Levels, AreFoundInTheScalesAlone) {
  const float scales[] = {0.375F, 0.25F, 0.875F};  // 3, 2 and 7 times an eighth
  const int8_t zeros[] = {0, -8, 7};
  const QuantTensor weight = row_of(scales, zeros);
  const RowLevels levels = levels_of(view_of(weight), 0);
  EXPECT_EQ(levels.channel, 0.125F);
  EXPECT_EQ(levels.steps, (std::vector<uint8_t>{3, 2, 7}));
}

TEST(Levels, OfAFormAreTheSameNumbers) {
  std::mt19937 random(1);
  QuantTensor weight = QuantTensor::allocate(kFormat, 64, 64 * 9).value();
  make_levels(weight, random);
  const QuantView view = view_of(weight);
  ASSERT_TRUE(check_levels(view).ok());
  for (int64_t row = 0; row < weight.n; ++row) {
    const RowLevels levels = levels_of(view, row);
    for (int64_t g = 0; g < 9; ++g) {
      const auto step = static_cast<float>(levels.steps[static_cast<size_t>(g)]);
      EXPECT_EQ(step * levels.channel, view.scale(row * 9 + g));
    }
  }
}

TEST(Levels, OfOneGroupAreAnyScale) {
  const QuantTensor weight = row_of(std::vector{0.0123F}, std::vector{int8_t{3}});
  EXPECT_EQ(levels_of(view_of(weight), 0).channel, 0.0123F);
}

TEST(Levels, RefuseOtherScalesByName) {
  struct Case {
    std::vector<float> scales;
    std::vector<int8_t> zeros;
  };
  const Case cases[] = {
      {{0.1F, 0.11F, 0.123F}, {0, 0, 0}},  // have no common measure
      {{1.0F, 9.0F}, {0, -8}},             // 9 * 15 is beyond 127
      {{1.0F, 16.0F}, {0, 0}},
      {{1.0F, 0.0F}, {0, 0}},
      {{1.0F, -2.0F}, {0, 0}},
      {{1.0F, 2.0F}, {0, 8}},           // no code
      {{0x1p-130F, 0x1p-129F}, {0, 0}}  // subnormal
  };
  for (const Case& c : cases) {
    const QuantTensor weight = row_of(c.scales, c.zeros);
    QuantView view = view_of(weight);
    view.name = "model.safetensors: x.weight_packed";
    const Status status = check_levels(view);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported) << c.scales[1];
    EXPECT_THAT(std::string(status.message()), HasSubstr("x.weight_packed"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("row 0"));
  }
}

}  // namespace
}  // namespace nibble
