#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/random_gemm.h"

// Activations in another order than the file's, and with stored scales.
namespace nibble {
namespace {

constexpr int64_t kN = 37;
constexpr int64_t kK = 256;
constexpr int64_t kM = 5;

QuantTensor random_weight(const WeightFormat& format) {
  return random_weight(format, {kN, kK}, 5).value();
}

std::vector<std::unique_ptr<Backend>> backends() {
  std::vector<std::unique_ptr<Backend>> all;
  for (const std::string_view isa : cpu::supported_isas()) {
    all.push_back(
        make_cpu_backend({.threads = 2, .isa = std::string(isa), .limit = ThreadLimit::kNone})
            .value());
  }
  return all;
}

std::vector<float> product(Backend& backend,
                           const QuantTensor& weight,
                           const ActSpec& act,
                           const std::vector<float>& x) {
  auto gemm = backend.prepare_gemm(weight, act, kM).value();
  std::vector<float> y(kM * kN, std::numeric_limits<float>::quiet_NaN());
  gemm->run({.x = x.data(), .x_stride = kK, .m = kM, .y = y.data(), .y_stride = kN});
  return y;
}

const std::vector<QuantScheme>& schemes() {
  using enum WeightCode;
  using enum ScalePer;
  static const std::vector<QuantScheme> all = {
      {"float", {kInt4, kGroup, 32, DType::kF32}, ActFormat::kFloat},
      {"fixed point", {kInt4, kGroup, 64, DType::kBF16}, ActFormat::kBf16},
      {"int8", {kInt8, kChannel, 0, DType::kF32}, ActFormat::kInt8Token},
      {"int4", {kInt4, kChannel, 0, DType::kF32}, ActFormat::kInt8Token},
      {"levels", {kInt4, kGroup, 64, DType::kBF16, ZeroPoints::kPerScale}, ActFormat::kInt8Token},
      {"fp8", {kFp8E4M3, kChannel, 0, DType::kF32}, ActFormat::kFp8Token},
      {"fp4", {kFp4E2M1, kGroup, 32, DType::kF8E8M0}, ActFormat::kFp8Token}};
  return all;
}

TEST(ActSpec, ColumnsAreTakenInTheOrderOfTheWeights) {
  std::vector<int32_t> columns(kK);
  std::iota(columns.begin(), columns.end(), 0);
  std::shuffle(columns.begin(), columns.end(), std::mt19937(3));
  const std::vector<float> x = random_floats(kM * kK, 1);
  std::vector<float> ordered(x.size());
  for (int64_t i = 0; i < kM * kK; ++i) {
    ordered[static_cast<size_t>(i)] =
        x[static_cast<size_t>(i / kK * kK + columns[static_cast<size_t>(i % kK)])];
  }
  for (const auto& backend : backends()) {
    for (const QuantScheme& scheme : schemes()) {
      const QuantTensor weight = random_weight(scheme.weight);
      ActSpec act(scheme.act);
      const std::vector<float> expected = product(*backend, weight, act, ordered);
      act.columns = std::make_shared<const std::vector<int32_t>>(columns);
      EXPECT_EQ(product(*backend, weight, act, x), expected)
          << scheme.name << " " << backend->name();
    }
  }
}

TEST(ActSpec, StaticScalesAreThoseOfTheFileAndBound) {
  std::vector<float> x = random_floats(kM * kK, 2);
  x[7] = 90.0F;  // beyond 127 times the scale
  for (const auto& backend : backends()) {
    for (const QuantScheme& scheme : schemes()) {
      if (scheme.act != ActFormat::kInt8Token && scheme.act != ActFormat::kFp8Token) {
        continue;
      }
      const QuantTensor weight = random_weight(scheme.weight);
      ActSpec act(scheme.act);
      act.static_scale = scheme.act == ActFormat::kInt8Token ? 0.03F : 0.01F;
      const std::vector<float> y = product(*backend, weight, act, x);
      std::vector<float> expected(y.size());
      reference_gemm(
          weight, act,
          {.x = x.data(), .x_stride = kK, .m = kM, .y = expected.data(), .y_stride = kN});
      for (size_t i = 0; i < y.size(); ++i) {
        EXPECT_NEAR(y[i], expected[i], 1e-4 * (1.0 + std::fabs(expected[i])))
            << scheme.name << " " << backend->name();
      }
      EXPECT_NE(y, product(*backend, weight, scheme.act, x)) << scheme.name;
    }
  }
}

TEST(ActSpec, RowsThatAreNotFiniteStayIt) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    std::vector<float> x = random_floats(kM * kK, 2);
    x[kK + 3] = bad;
    for (const QuantScheme& scheme : schemes()) {
      if (scheme.act != ActFormat::kInt8Token && scheme.act != ActFormat::kFp8Token) {
        continue;
      }
      ActSpec act(scheme.act);
      act.static_scale = 0.03F;
      const auto backend = make_cpu_backend({}).value();
      const std::vector<float> y = product(*backend, random_weight(scheme.weight), act, x);
      for (int64_t i = 0; i < kN; ++i) {
        EXPECT_TRUE(std::isfinite(y[static_cast<size_t>(i)]));
        EXPECT_TRUE(std::isnan(y[static_cast<size_t>(kN + i)])) << scheme.name;
      }
    }
  }
}

}  // namespace
}  // namespace nibble
