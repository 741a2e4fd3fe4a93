// Scales and zero points of w4a8_g64 and w4a8_g128: whether they are levels, and what they cost.

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "base/f16.h"
#include "quant/fake_quant.h"
#include "quant/levels.h"
#include "quantizer/encoder.h"

namespace nibble {
namespace {

struct Chosen {
  QuantScheme scheme;
  int64_t n = 0;
  int64_t k = 0;
  std::vector<float> scales;
  std::vector<float> zeros;
};

Chosen choose(std::string_view name,
              const std::vector<float>& x,
              int64_t n,
              const float* importance = nullptr) {
  Chosen chosen{.scheme = find_scheme(name).value(), .n = n, .k = std::ssize(x) / n};
  const auto encoder = make_encoder({.scheme = chosen.scheme}, n, chosen.k).value();
  EXPECT_TRUE(encoder->takes_given_rows());
  chosen.scales.resize(static_cast<size_t>(n * chosen.scheme.weight.groups(chosen.k)));
  chosen.zeros.resize(chosen.scales.size());
  encoder->choose_scales({.rows = n, .x = x.data(), .importance = importance}, chosen.scales.data(),
                         chosen.zeros.data());
  return chosen;
}

/// A tensor without codes.
QuantTensor tensor_of(const Chosen& chosen) {
  QuantTensor weight = QuantTensor::allocate(chosen.scheme.weight, chosen.n, chosen.k).value();
  std::ranges::copy(chosen.scales, weight.scales.as<float>().begin());
  std::ranges::transform(chosen.zeros, weight.zeros.as<int8_t>().begin(),
                         [](float zero) { return static_cast<int8_t>(zero); });
  return weight;
}

/// Squared error of the nearest codes, by importance.
double error_of(const Chosen& chosen, const std::vector<float>& x, const float* importance) {
  const QuantTensor weight = tensor_of(chosen);
  const int64_t groups = chosen.scheme.weight.groups(chosen.k);
  std::vector<float> decoded(static_cast<size_t>(chosen.k));
  double error = 0;
  for (int64_t row = 0; row < chosen.n; ++row) {
    fake_quant_row(chosen.scheme.weight, x.data() + row * chosen.k, chosen.k,
                   {weight.scales.as<float>().data() + row * groups,
                    weight.zeros.as<int8_t>().data() + row * groups},
                   decoded.data());
    for (int64_t i = 0; i < chosen.k; ++i) {
      const auto at = static_cast<size_t>(i);
      const double lost = x[static_cast<size_t>(row * chosen.k) + at] - decoded[at];
      error += lost * lost * (importance == nullptr ? 1.0 : importance[at]);
    }
  }
  return error;
}

/// Rows with outliers, with groups of zeros, of one sign, and of sizes far apart.
std::vector<float> all_kinds(int64_t n, int64_t k) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(static_cast<size_t>(n * k));
  for (int64_t i = 0; i < n * k; ++i) {
    const int64_t row = i / k;
    const int64_t group = i % k / 64;
    float value = normal(random);
    value = row % 7 == 1 && i % 97 == 0 ? 30 * value : value;
    value = row % 7 == 2 && group == 1 ? 0 : value;
    value = row % 7 == 3 ? std::fabs(value) : row % 7 == 4 ? -std::fabs(value) : value;
    value *= row % 7 == 5 ? std::ldexp(1.0F, static_cast<int>(-2 * group)) : 1.0F;
    const double size = row % 11 == 10 ? 1e38 : row % 11 == 9 ? 1e-33 : 0.02;
    x[static_cast<size_t>(i)] = static_cast<float>(std::clamp(value * size, -3e38, 3e38));
  }
  std::fill_n(x.begin(), k, 0.0F);
  return x;
}

class LevelsEncoder : public testing::TestWithParam<const char*> {};

TEST_P(LevelsEncoder, GivesLevelsInBf16ForEveryKindOfRow) {
  constexpr int64_t kN = 77, kK = 1152;
  const std::vector<float> x = all_kinds(kN, kK);
  std::vector<float> importance(kK);
  for (size_t i = 0; i < importance.size(); ++i) {
    importance[i] = i % 50 == 0 ? 100.0F : 0.3F;
  }
  for (const float* counts :
       {static_cast<const float*>(nullptr), static_cast<const float*>(importance.data())}) {
    const Chosen chosen = choose(GetParam(), x, kN, counts);
    const QuantTensor weight = tensor_of(chosen);
    const Status levels = check_levels(view_of(weight));
    EXPECT_TRUE(levels.ok()) << levels.message();
    for (size_t i = 0; i < chosen.scales.size(); ++i) {
      EXPECT_EQ(bf16_to_f32(f32_to_bf16(chosen.scales[i])), chosen.scales[i]);
      const float zero = chosen.zeros[i];
      EXPECT_TRUE(std::isfinite(std::max(7 - zero, zero + 8) * chosen.scales[i]));
      EXPECT_EQ(zero, std::nearbyint(zero));
    }
  }
}

TEST_P(LevelsEncoder, LosesLittleMoreThanScalesOfTheirOwn) {
  constexpr int64_t kN = 64, kK = 2048;
  std::mt19937 random(9);
  std::normal_distribution<float> normal(0, 0.02F);
  std::vector<float> x(static_cast<size_t>(kN * kK));
  std::ranges::generate(x, [&] { return normal(random); });
  Chosen levels = choose(GetParam(), x, kN);
  QuantScheme free = levels.scheme;
  free.act = ActFormat::kFloat;
  Chosen own{.scheme = free, .n = kN, .k = kK, .scales = levels.scales, .zeros = levels.zeros};
  const auto encoder = make_encoder({.scheme = free}, kN, kK).value();
  encoder->choose_scales({.rows = kN, .x = x.data()}, own.scales.data(), own.zeros.data());
  const double ratio = error_of(levels, x, nullptr) / error_of(own, x, nullptr);
  EXPECT_LT(ratio, 1.03);  // 0.13 dB
  EXPECT_GT(ratio, 0.99);
}

TEST_P(LevelsEncoder, CountsColumnsByTheirImportance) {
  constexpr int64_t kN = 32, kK = 512;
  std::mt19937 random(11);
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> x(static_cast<size_t>(kN * kK));
  std::ranges::generate(x, [&] { return normal(random); });
  std::vector<float> importance(kK);
  std::ranges::generate(importance, [&] { return std::exp(2 * normal(random)); });
  const Chosen with = choose(GetParam(), x, kN, importance.data());
  const Chosen without = choose(GetParam(), x, kN);
  EXPECT_LT(error_of(with, x, importance.data()), 0.97 * error_of(without, x, importance.data()));
}

INSTANTIATE_TEST_SUITE_P(Groups, LevelsEncoder, testing::Values("w4a8_g64", "w4a8_g128"));

}  // namespace
}  // namespace nibble
