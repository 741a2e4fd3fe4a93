#include "quantizer/algorithms/rotation.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

namespace nibble {
namespace {

/// R, made by applying the rotation to the rows of the identity.
std::vector<std::vector<double>> matrix_of(const Rotation& rotation) {
  const auto n = static_cast<size_t>(rotation.size());
  std::vector<std::vector<double>> rows(n, std::vector<double>(n, 0.0));
  for (size_t i = 0; i < n; ++i) {
    rows[i][i] = 1.0;
    rotation.apply(rows[i].data());
  }
  return rows;
}

// Widths of models and heads: powers of two, and times 3, 5, 7, 9, 15, 27 and 45.
TEST(Rotation, IsOrthogonalAndMixesAllNumbersAlike) {
  for (const int64_t n : {1, 2, 64, 80, 96, 112, 128, 256, 288, 576, 896, 960, 1728, 2880}) {
    const Rotation rotation(n, 7);
    EXPECT_EQ(rotation.block(), n);
    const auto rows = matrix_of(rotation);
    const double entry = 1.0 / std::sqrt(static_cast<double>(n));
    for (size_t i = 0; i < rows.size(); i += 1 + rows.size() / 40) {
      for (size_t j = 0; j < rows.size(); ++j) {
        ASSERT_NEAR(std::fabs(rows[i][j]), entry, 1e-12) << n;
        double product = 0;
        for (size_t c = 0; c < rows.size(); ++c) {
          product += rows[i][c] * rows[j][c];
        }
        ASSERT_NEAR(product, i == j ? 1.0 : 0.0, 1e-9) << n << ": rows " << i << ", " << j;
      }
    }
  }
}

TEST(Rotation, MixesBlocksWhereNoMatrixIsKnown) {
  const Rotation rotation(8 * 23, 1);  // neither 23 * 8 - 1 nor 23 * 4 - 1 is prime
  EXPECT_EQ(rotation.block(), 8);
  const auto rows = matrix_of(rotation);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < rows.size(); ++j) {
      EXPECT_NEAR(std::fabs(rows[i][j]), i / 8 == j / 8 ? std::sqrt(0.125) : 0.0, 1e-12);
    }
  }
}

TEST(Rotation, FollowsItsSeed) {
  EXPECT_EQ(matrix_of(Rotation(64, 3)), matrix_of(Rotation(64, 3)));
  EXPECT_NE(matrix_of(Rotation(64, 3)), matrix_of(Rotation(64, 4)));
}

}  // namespace
}  // namespace nibble
