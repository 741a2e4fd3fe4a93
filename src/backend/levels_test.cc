// INT4 in groups of two levels with INT8 activations against sums of integers, bit for bit.

#include "quant/levels.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "backend/backend.h"
#include "backend/cpu/isa.h"
#include "backend/testing/random_gemm.h"

namespace nibble {
namespace {

constexpr ActFormat kAct = ActFormat::kInt8Token;

WeightFormat groups_of(int size) {
  return {WeightCode::kInt4, ScalePer::kGroup, size, DType::kBF16, ZeroPoints::kPerScale};
}

/// Rows of INT8 codes times a scale, of which every row has one of 127.
struct Rows {
  std::vector<float> x;  // [m, k]
  std::vector<int> codes;
};

Rows random_rows(int64_t m, int64_t k, uint32_t seed) {
  std::mt19937 random(seed);
  Rows rows;
  for (int64_t i = 0; i < m * k; ++i) {
    const int code = i % k == 0 ? 127 : static_cast<int>(random() % 255) - 127;
    rows.codes.push_back(code);
    rows.x.push_back(static_cast<float>(code) * 0x1p-5F);
  }
  return rows;
}

/// What QServe's formula says, of integers until the two scales are due.
std::vector<float> expected_of(const QuantTensor& weight, const Rows& rows) {
  const int64_t groups = weight.format.groups(weight.k);
  const auto m = std::ssize(rows.codes) / weight.k;
  std::vector<float> y(static_cast<size_t>(m * weight.n));
  for (int64_t n = 0; n < weight.n; ++n) {
    const RowLevels levels = levels_of(view_of(weight), n);
    EXPECT_GT(levels.channel, 0.0F);
    for (int64_t row = 0; row < m; ++row) {
      int64_t sum = 0;
      for (int64_t k = 0; k < weight.k; ++k) {
        const auto group = static_cast<size_t>(k / weight.format.group_size);
        const auto byte = std::to_integer<int>(weight.codes.data()[(n * weight.k + k) / 2]);
        const int code = (byte >> (k % 2 * 4) & 15) - 8;
        const int zero = weight.zeros.as<int8_t>()[static_cast<size_t>(n * groups) + group];
        const int value = (code - zero) * levels.steps[group];
        EXPECT_LE(std::abs(value), 127);
        sum += int64_t{rows.codes[static_cast<size_t>(row * weight.k + k)]} * value;
      }
      const float scale = levels.channel * 0x1p-5F;
      y[static_cast<size_t>(row * weight.n + n)] = static_cast<float>(sum) * scale;
    }
  }
  return y;
}

TEST(LevelsProduct, IsTheIntegersSumOnEveryInstructionSetAndInEveryBatch) {
  constexpr int64_t kMost = 70;
  for (const int group : {64, 128}) {
    for (const Problem shape : {Problem{1, 128}, {17, 256}, {48, 640}, {33, 1152}, {100, 4224}}) {
      const QuantTensor weight =
          random_weight(groups_of(group), shape, static_cast<uint32_t>(shape.n + group)).value();
      const Rows rows = random_rows(kMost, shape.k, static_cast<uint32_t>(shape.k));
      const std::vector<float> expected = expected_of(weight, rows);
      for (const std::string_view isa : cpu::supported_isas()) {
        const auto backend =
            make_cpu_backend({.threads = 3, .isa = std::string(isa), .limit = ThreadLimit::kNone});
        const auto gemm = (*backend)->prepare_gemm(weight, kAct, kMost).value();
        for (const int64_t m : {kMost, int64_t{33}, int64_t{17}, int64_t{16}, int64_t{8},
                                int64_t{5}, int64_t{4}, int64_t{3}, int64_t{2}, int64_t{1}}) {
          std::vector<float> y(static_cast<size_t>(m * shape.n),
                               std::numeric_limits<float>::quiet_NaN());
          gemm->run({.x = rows.x.data(),
                     .x_stride = shape.k,
                     .m = m,
                     .y = y.data(),
                     .y_stride = shape.n});
          EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.size() * 4), 0)
              << isa << ", groups of " << group << ", n " << shape.n << ", k " << shape.k << ", m "
              << m;
        }
      }
    }
  }
}

TEST(LevelsProduct, RefusesScalesThatAreNoLevels) {
  const auto backend = make_cpu_backend({.threads = 1}).value();
  QuantTensor weight = random_weight(groups_of(64), {20, 256}, 1).value();
  auto gemm = backend->prepare_gemm(weight, kAct, 1).value();
  weight.scales.as<float>()[18 * 4 + 1] *= 1.01F;
  QuantView view = view_of(weight);
  view.name = "x.weight_packed";
  const Status refusal = backend->prepare_gemm({&view, 1}, kAct, 1).status();
  EXPECT_EQ(refusal.code(), StatusCode::kUnsupported);
  EXPECT_THAT(std::string(refusal.message()), testing::HasSubstr("x.weight_packed"));
  EXPECT_THAT(std::string(refusal.message()), testing::HasSubstr("row 18"));
  EXPECT_EQ(gemm->update(0, weight).code(), StatusCode::kUnsupported);
  EXPECT_TRUE(backend->prepare_gemm(weight, ActFormat::kBf16, 1).ok());
}

// A group as wide as the rows, without zero points, is a channel.
TEST(LevelsProduct, LeavesOneGroupWithoutZeroPointsAsItIs) {
  constexpr int64_t kN = 5, kK = 128;
  const WeightFormat group{WeightCode::kInt4, ScalePer::kGroup, kK, DType::kBF16};
  const WeightFormat channel{WeightCode::kInt4, ScalePer::kChannel, 0, DType::kBF16};
  const std::vector<float> x = random_floats(kK, 1);
  std::vector<float> results[2];
  for (const bool whole : {false, true}) {
    const auto backend = make_cpu_backend({.threads = 1}).value();
    const QuantTensor weight = random_weight(whole ? channel : group, {kN, kK}, 3).value();
    std::vector<float>& y = results[whole ? 1 : 0];
    y.resize(kN);
    const auto gemm = backend->prepare_gemm(weight, kAct, 1).value();
    gemm->run({.x = x.data(), .x_stride = kK, .m = 1, .y = y.data(), .y_stride = kN});
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(LevelsProduct, TakesNoOtherGroups) {
  const auto backend = make_cpu_backend({.threads = 1}).value();
  for (const int group : {32, 256}) {
    EXPECT_EQ(backend->check_gemm(groups_of(group), kAct, 1024).code(), StatusCode::kUnsupported);
  }
  EXPECT_EQ(backend->check_gemm(groups_of(128), kAct, 576).code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace nibble
