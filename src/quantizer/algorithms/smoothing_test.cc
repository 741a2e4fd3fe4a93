#include "quantizer/algorithms/smoothing.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "quantizer/encoder.h"

namespace nibble {
namespace {

constexpr int64_t kColumns = 64;
constexpr int64_t kOutputs = 48;
constexpr int64_t kSample = 40;

/// A site of one matrix whose inputs have two channels that are large.
struct SmallSite {
  QuantScheme scheme;
  std::unique_ptr<MatrixEncoder> encoder;
  std::vector<float> w;
  ChannelStatistics statistics;
  ExpectedBlocks blocks{.block = 32, .outlier_share = 0};

  explicit SmallSite(std::string_view name, float largest) : scheme(find_scheme(name).value()) {
    encoder = make_encoder({.scheme = scheme}, kOutputs, kColumns).value();
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < kOutputs * kColumns; ++i) {
      w.push_back(normal(random));
    }
    statistics.largest.assign(kColumns, 0.0F);
    statistics.sums.assign(kColumns, 0.0);
    for (int64_t i = 0; i < kSample * kColumns; ++i) {
      const int64_t channel = i % kColumns;
      const float x = normal(random) * (channel == 3 || channel == 17 ? largest : 1.0F);
      statistics.sample.push_back(x);
      float& most = statistics.largest[static_cast<size_t>(channel)];
      most = std::max(most, std::fabs(x));
      statistics.sums[static_cast<size_t>(channel)] += static_cast<double>(std::fabs(x));
    }
  }

  [[nodiscard]] std::vector<float> search(FactorRule rule,
                                          ThreadPool& pool,
                                          std::vector<int32_t> factor_of = {}) const {
    const MatrixToRound matrix{.w = w.data(),
                               .n = kOutputs,
                               .k = kColumns,
                               .format = scheme.weight,
                               .encoder = encoder.get()};
    return search_factors({.rule = rule,
                           .act = scheme.act,
                           .blocks = blocks,
                           .site = statistics,
                           .matrices = {&matrix, 1},
                           .factor_of = std::move(factor_of)},
                          pool);
  }
};

TEST(Smoothing, MakesLargeActivationsSmaller) {
  ThreadPool pool(2);
  const SmallSite site("w8a8_int8", 60.0F);
  const std::vector<float> factors = site.search(FactorRule::kLargest, pool);
  ASSERT_EQ(factors.size(), static_cast<size_t>(kColumns));
  float others = 0;
  for (size_t i = 0; i < factors.size(); ++i) {
    others = i == 3 || i == 17 ? others : std::max(others, factors[i]);
  }
  EXPECT_GE(std::min(factors[3], factors[17]), 4 * others);
}

// Where the block of the large channels is expected to have 8 bits there is less to gain.
TEST(Smoothing, KnowsThatBlocksOf8BitsNeedLess) {
  ThreadPool pool(2);
  SmallSite site("w4ax_b32", 60.0F);
  const auto of_large = [&] {
    const std::vector<float> factors = site.search(FactorRule::kLargest, pool);
    return std::min(factors[3], factors[17]) / factors[4];
  };
  const float four = of_large();
  site.blocks.outlier_share = 0.5;
  EXPECT_GT(four, 4.0F);
  EXPECT_LT(of_large(), four);
}

TEST(Smoothing, MultipliesTheWeightsOfLargeChannels) {
  ThreadPool pool(2);
  const SmallSite site("w4a16_g32", 60.0F);
  const std::vector<float> factors = site.search(FactorRule::kMean, pool);
  EXPECT_GT(factors[3], 1.0F);
  EXPECT_GT(factors[17], 1.0F);
}

TEST(Smoothing, DoesNotDependOnThreads) {
  ThreadPool one(1);
  ThreadPool three(3);
  for (const char* scheme : {"w4a8", "w4ax_b32"}) {
    const SmallSite site(scheme, 20.0F);
    for (const FactorRule rule : {FactorRule::kLargest, FactorRule::kMean}) {
      EXPECT_EQ(site.search(rule, one), site.search(rule, three));
    }
  }
}

// As under grouped queries: two channels of the output of attention read one channel of values.
TEST(Smoothing, ChannelsThatShareAFactorGetOne) {
  ThreadPool pool(2);
  const SmallSite site("w8a8_int8", 60.0F);
  std::vector<int32_t> halves(kColumns);
  for (int64_t i = 0; i < kColumns; ++i) {
    halves[static_cast<size_t>(i)] = static_cast<int32_t>(i % (kColumns / 2));
  }
  const std::vector<float> factors = site.search(FactorRule::kLargest, pool, halves);
  EXPECT_EQ(factors.size(), halves.size() / 2);
  EXPECT_GT(factors[3], factors[4]);
}

// Channels that are always 0 keep their weights.
TEST(Smoothing, LeavesDeadChannelsAlone) {
  ThreadPool pool(2);
  SmallSite site("w8a8_int8", 60.0F);
  for (size_t i = 5; i < site.statistics.sample.size(); i += kColumns) {
    site.statistics.sample[i] = 0;
  }
  site.statistics.largest[5] = 0;
  site.statistics.sums[5] = 0;
  for (const FactorRule rule : {FactorRule::kLargest, FactorRule::kMean}) {
    EXPECT_EQ(site.search(rule, pool)[5], 1.0F);
  }
}

}  // namespace
}  // namespace nibble
