#include "backend/cpu/simd/simd_scalar.h"
// The vocabulary comes first.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "backend/cpu/kernels/attention_queries.h"

namespace nibble::cpu {
namespace {

using Row = std::vector<float>;

/// Rows of several kinds: normal ones, with outliers, with one large element, alike, tiny, large.
std::vector<Row> rows_of(int64_t dim) {
  std::mt19937 random(static_cast<uint32_t>(dim));
  std::normal_distribution<float> normal(0.0F, 1.0F);
  Row row(static_cast<size_t>(dim));
  std::vector<Row> rows;
  const auto add = [&](const auto& element) {
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = element(i);
    }
    rows.push_back(row);
  };
  for (int i = 0; i < 20; ++i) {
    add([&](size_t) { return normal(random); });
  }
  add([&](size_t i) { return normal(random) * (i % 7 == 0 ? 30.0F : 1.0F); });
  add([&](size_t i) { return i == 3 ? -1.99F : 0.0F; });
  add([&](size_t i) { return i == 3 ? 1000.0F : normal(random); });
  for (const float value : {1.0F, 1.99F, -0.51F, 1.2e-38F, 4e-31F, 1e-29F, 1e27F}) {
    add([&](size_t) { return value; });
  }
  add([](size_t) { return 0.0F; });
  return rows;
}

float load(const Row& row, Row& q) {
  AttentionTask task;
  task.q = {row.data(), Element::kF32};
  task.group = 1;
  task.kv.code = 2;
  task.kv.head_dim = static_cast<int64_t>(row.size());
  q.assign((row.size() + 31) / 32 * 32, std::numeric_limits<float>::quiet_NaN());
  return load_query(task, 0, static_cast<int64_t>(q.size()), q.data());
}

TEST(AttentionQueries, AreMultiplesWhoseProductsWithCodesSumExactly) {
  for (const int64_t dim : {8, 24, 64, 80, 128, 256, 512}) {
    for (const Row& row : rows_of(dim)) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", first " << row[0]);
      Row q;
      const float unit = load(row, q);
      int exponent = 0;
      ASSERT_EQ(std::frexp(unit, &exponent), 0.5F);
      double sum = 0.0;
      double magnitudes = 0.0;
      double largest = 0.0;
      for (size_t i = 0; i < q.size(); ++i) {
        const float expected = i < row.size() ? bf16_to_f32(f32_to_bf16(row[i])) : 0.0F;
        ASSERT_LE(std::fabs(q[i] - expected), unit / 2) << "element " << i;
        ASSERT_EQ(q[i] / unit, std::nearbyint(q[i] / unit));
        ASSERT_EQ(q[i], bf16_to_f32(f32_to_bf16(q[i])));
        sum += std::fabs(q[i]) / unit;
        magnitudes += std::fabs(expected) / unit;
        largest = std::max(largest, std::fabs(q[i]) / static_cast<double>(unit));
      }
      ASSERT_LT(127 * sum, 0x1p24);
      ASSERT_LE(largest, 0x1p14);
      // Half the unit would be too small.
      EXPECT_TRUE(unit == 0x1p-100F || magnitudes >= 0x1p16 || largest >= 0x1p13);
    }
  }
}

TEST(AttentionQueries, ThatAreNotFiniteOrTooLargeBecomeNan) {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(),
                            -std::numeric_limits<float>::infinity(), 0x1p101F}) {
    Row row(24, 1.0F);
    row[17] = value;
    Row q;
    EXPECT_TRUE(std::isnan(load(row, q)));
    for (const float x : q) {
      EXPECT_TRUE(std::isnan(x));
    }
  }
}

TEST(AttentionQueries, InPairsAreTheSameNumbers) {
  for (const int64_t dim : {8, 40, 64, 512}) {
    Row q;
    const float unit = load(rows_of(dim).front(), q);
    std::vector<int32_t> twos(static_cast<size_t>(dim) / 2);
    std::vector<int32_t> fours(twos.size());
    pair_queries<2>(q.data(), dim, unit, twos.data());
    pair_queries<4>(q.data(), dim, unit, fours.data());
    for (int64_t d = 0; d < dim; ++d) {
      const auto half = [&](const std::vector<int32_t>& pairs, int64_t apart) {
        const int64_t pair = d / (2 * apart) * apart + d % apart;
        const int32_t shift = d / apart % 2 * 16;
        return static_cast<int16_t>(pairs[static_cast<size_t>(pair)] >> shift);
      };
      ASSERT_EQ(static_cast<float>(half(twos, 2)) * unit, q[static_cast<size_t>(d)]);
      ASSERT_EQ(static_cast<float>(half(fours, 4)) * unit, q[static_cast<size_t>(d)]);
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
