#include "quant/hadamard.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace nibble {
namespace {

std::vector<float> random_head(int64_t dim) {
  std::mt19937 random(static_cast<uint32_t>(dim));
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(dim));
  std::ranges::generate(x, [&] { return normal(random); });
  return x;
}

TEST(Hadamard, BlocksEqualTheMatrixWithoutSigns) {
  for (const auto& [dim, block] :
       {std::pair(2, 2), {6, 2}, {12, 4}, {96, 32}, {768, 256}, {1536, 512}, {1024, 1024}}) {
    const std::vector<float> x = random_head(dim);
    std::vector<float> turned = x;
    std::vector<double> wide(x.begin(), x.end());
    turn_blocks(turned.data(), dim, block);
    turn_blocks(wide.data(), dim, block);
    for (int64_t i = 0; i < dim; ++i) {
      double sum = 0.0;
      for (int64_t j = 0; j < block; ++j) {
        const bool minus = std::popcount(static_cast<uint64_t>(i % block & j)) % 2 != 0;
        sum += (minus ? -1.0 : 1.0) * x[static_cast<size_t>(i / block * block + j)];
      }
      sum /= std::sqrt(static_cast<double>(block));
      EXPECT_NEAR(turned[static_cast<size_t>(i)], sum, 1e-5) << dim << " at " << i;
      EXPECT_NEAR(wide[static_cast<size_t>(i)], sum, 1e-12) << dim << " at " << i;
    }
    turn_blocks(turned.data(), dim, block);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(turned[i], x[i], 1e-5);
    }
  }
}

TEST(Hadamard, EqualsTheMatrix) {
  for (const int64_t dim : {8, 64, 80, 96, 128, 256}) {
    const std::vector<float> x = random_head(dim);
    std::vector<float> turned = x;
    hadamard(turned.data(), dim);
    const int64_t block = hadamard_block(dim);
    EXPECT_EQ(dim % block, 0);
    for (int64_t i = 0; i < dim; ++i) {
      double sum = 0.0;
      for (int64_t j = 0; j < block; ++j) {
        const auto both = static_cast<uint64_t>(i % block & j);
        const bool minus = std::popcount(both) % 2 != 0;
        sum += (minus != hadamard_flips(j) ? -1.0 : 1.0) *
               x[static_cast<size_t>(i / block * block + j)];
      }
      EXPECT_NEAR(turned[static_cast<size_t>(i)], sum / std::sqrt(static_cast<double>(block)), 1e-5)
          << dim << " at " << i;
    }
    inverse_hadamard(turned.data(), dim);
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(turned[i], x[i], 1e-5) << dim;
    }
  }
}

// Neither a large channel nor an offset of all stays in one place.
TEST(Hadamard, SpreadsWhatIsLarge) {
  for (const int64_t dim : {64, 128, 256}) {
    std::vector<float> channel(static_cast<size_t>(dim), 0.0F);
    channel[5] = 1.0F;
    std::vector<float> offset(static_cast<size_t>(dim), 1.0F / std::sqrt(static_cast<float>(dim)));
    for (std::vector<float>& x : {std::ref(channel), std::ref(offset)}) {
      hadamard(x.data(), dim);
      const auto largest = std::ranges::max(x, {}, [](float value) { return std::fabs(value); });
      EXPECT_LE(std::fabs(largest), 1.5F / std::sqrt(static_cast<float>(dim))) << dim;
    }
  }
}

}  // namespace
}  // namespace nibble
