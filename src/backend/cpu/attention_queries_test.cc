#include "backend/cpu/simd/simd_scalar.h"
// The vocabulary comes first.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
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

QueryCodes codes_of(const Row& row) {
  AttentionTask task;
  task.q = {row.data(), Element::kF32};
  task.group = 1;
  task.kv.code = 2;
  task.kv.head_dim = static_cast<int64_t>(row.size());
  return {task, 0};
}

Row bf16_rounded(Row row) {
  for (float& x : row) {
    x = bf16_to_f32(f32_to_bf16(x));
  }
  return row;
}

float largest_of(const Row& row) {
  return std::accumulate(row.begin(), row.end(), 0.0F,
                         [](float most, float x) { return std::max(most, std::fabs(x)); });
}

TEST(AttentionQueries, AreTheNearestMultiplesOfAnEvenPartOfTheLargest) {
  for (const int64_t dim : {8, 24, 64, 80, 128, 256, 512}) {
    for (const Row& given : rows_of(dim)) {
      SCOPED_TRACE(testing::Message() << "dim " << dim << ", first " << given[0]);
      const QueryCodes query = codes_of(given);
      const Row row = bf16_rounded(given);
      const float largest = std::max(largest_of(row), 0x1p-100F);
      ASSERT_EQ(query.unit, largest / 127.0F);
      int32_t sum = 0;
      int32_t most = 0;
      for (size_t i = 0; i < row.size(); ++i) {
        const double exact = static_cast<double>(row[i]) / query.unit;
        ASSERT_LE(std::fabs(query.codes[i] - exact), 0.5001) << "element " << i;
        sum += query.codes[i];
        most = std::max(most, std::abs(query.codes[i]));
      }
      for (size_t i = row.size(); i < (row.size() + 15) / 16 * 16; ++i) {
        ASSERT_EQ(query.codes[i], 0) << "past the end: " << i;
      }
      EXPECT_EQ(query.sum, sum);
      EXPECT_EQ(most, largest > 0x1p-100F ? 127 : most);
      EXPECT_LE(most, 127);
    }
  }
}

TEST(AttentionQueries, ThatAreNotFiniteOrTooLargeHaveNoUnit) {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(),
                            -std::numeric_limits<float>::infinity(), 0x1p101F}) {
    for (const size_t place : {size_t{0}, size_t{17}, size_t{23}}) {
      Row row(24, 1.0F);
      row[place] = value;
      const QueryCodes query = codes_of(row);
      EXPECT_TRUE(std::isnan(query.unit));
      EXPECT_EQ(query.sum, 0);
      for (size_t i = 0; i < 32; ++i) {
        EXPECT_EQ(query.codes[i], 0);
      }
    }
  }
}

TEST(AttentionQueries, InPairsAreTheSameNumbers) {
  for (const int64_t dim : {8, 40, 64, 512}) {
    const QueryCodes query = codes_of(rows_of(dim).front());
    std::vector<int32_t> twos(static_cast<size_t>(dim) / 2);
    std::vector<int32_t> fours(twos.size());
    pair_queries<2>(query.codes, dim, twos.data());
    pair_queries<4>(query.codes, dim, fours.data());
    for (int64_t d = 0; d < dim; ++d) {
      const auto half = [&](const std::vector<int32_t>& pairs, int64_t apart) {
        const int64_t pair = d / (2 * apart) * apart + d % apart;
        const int64_t shift = d / apart % 2 * 16;
        return static_cast<int16_t>(pairs[static_cast<size_t>(pair)] >> shift);
      };
      ASSERT_EQ(half(twos, 2), query.codes[d]);
      ASSERT_EQ(half(fours, 4), query.codes[d]);
    }
  }
}

}  // namespace
}  // namespace nibble::cpu
