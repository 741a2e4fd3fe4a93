#include "quantizer/algorithms/block_choice.h"

#include <algorithm>
#include <limits>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "quantizer/algorithms/testing/rounding_problem.h"

namespace nibble {
namespace {

using testing::ElementsAre;

/// A site whose blocks cost the same with every clip.
BlockSite site_of(const std::vector<double>& four, int64_t work, int64_t parts = 1) {
  BlockSite site;
  for (const double cost : four) {
    auto& costs = site.costs.low.emplace_back();
    costs.fill(cost);
    site.costs.high.push_back(cost / 100);
  }
  site.outputs = 1;
  site.work = work;
  site.parts = parts;
  return site;
}

TEST(BlockChoice, TakesWhatHelpsMostForItsWork) {
  const BlockRanking ranking({site_of({1, 8, 2}, 10), site_of({12, 3}, 20)});
  const BlockChoice none = ranking.choose(0);
  EXPECT_THAT(none.sites[0].bits, ElementsAre(4, 4, 4));
  EXPECT_EQ(none.outlier_share, 0);
  EXPECT_NEAR(none.error, 26, 1e-9);
  const BlockChoice one = ranking.choose(10.0 / 70);
  EXPECT_THAT(one.sites[0].bits, ElementsAre(4, 8, 4));  // 0.8 for a multiply-add, 0.6 the next
  EXPECT_THAT(one.sites[1].bits, ElementsAre(4, 4));
  const BlockChoice two = ranking.choose(30.0 / 70);
  EXPECT_THAT(two.sites[1].bits, ElementsAre(8, 4));
  EXPECT_DOUBLE_EQ(two.outlier_share, 30.0 / 70);
  EXPECT_NEAR(two.error, 1 + 0.08 + 2 + 0.12 + 3, 1e-9);
  EXPECT_THAT(ranking.choose(1).sites[1].bits, ElementsAre(8, 8));
  EXPECT_DOUBLE_EQ(ranking.least_share(), 10.0 / 70);
}

TEST(BlockChoice, PassesOverWhatDoesNotFit) {
  const BlockRanking ranking({site_of({9}, 50), site_of({1, 1}, 25)});
  const BlockChoice choice = ranking.choose(0.3);
  EXPECT_THAT(choice.sites[0].bits, ElementsAre(4));
  EXPECT_THAT(choice.sites[1].bits, ElementsAre(8, 4));
}

// Of experts that no row reached.
TEST(BlockChoice, GivesWhatHasNoWork8Bits) {
  const BlockRanking ranking({site_of({9}, 50), site_of({0, 0}, 0), site_of({1, 1}, 25)});
  const BlockChoice choice = ranking.choose(0);
  EXPECT_THAT(choice.sites[0].bits, ElementsAre(4));
  EXPECT_THAT(choice.sites[1].bits, ElementsAre(8, 8));
  EXPECT_THAT(choice.sites[2].bits, ElementsAre(4, 4));
  EXPECT_EQ(choice.outlier_share, 0);
  EXPECT_DOUBLE_EQ(ranking.least_share(), 0.25);
}

TEST(BlockChoice, GivesEachPartAsManyBlocks) {
  const BlockRanking ranking({site_of({1, 9, 2, 3, 8, 7}, 10, 2)});
  EXPECT_THAT(ranking.choose(0.4).sites[0].bits, ElementsAre(4, 8, 4, 4, 8, 4));
  EXPECT_THAT(ranking.choose(0.7).sites[0].bits, ElementsAre(4, 8, 8, 4, 8, 8));
  EXPECT_DOUBLE_EQ(ranking.least_share(), 2.0 / 6);
}

TEST(BlockChoice, ClipsWhereTheFourBitBlocksLoseLeast) {
  BlockSite site = site_of({5, 5, 5}, 10);
  site.costs.low[0] = {9, 9, 9, 9, 9, 9, 1000};  // is given 8 bits and does not count then
  site.costs.low[1] = {5, 5, 3, 5, 5, 5, 5};
  site.costs.low[2] = {5, 5, 4, 5, 5, 4.5, 5};
  site.costs.high = {0, 0, 0};
  const BlockRanking ranking({site, site_of({1}, 2)});
  const BlockChoice choice = ranking.choose(10.0 / 32);
  EXPECT_THAT(choice.sites[0].bits, ElementsAre(8, 4, 4));
  EXPECT_EQ(choice.sites[0].clip, kClips[2]);
  EXPECT_EQ(choice.sites[1].clip, 1.0F);  // of equal ones that which clips least
  EXPECT_NEAR(choice.error, 7 + 1, 1e-9);
}

TEST(BlockChoice, SitesWithoutOutputsComeLast) {
  BlockSite dead = site_of({100}, 10);
  dead.outputs = 0;
  const BlockRanking ranking({dead, site_of({1}, 10)});
  EXPECT_THAT(ranking.choose(0.5).sites[1].bits, ElementsAre(8));
}

TEST(BlockChoice, PartsEndWithBlocks) {
  EXPECT_EQ(equal_parts(1024, 128), 8);
  EXPECT_EQ(equal_parts(768, 32), 8);
  EXPECT_EQ(equal_parts(256, 64), 4);
  EXPECT_EQ(equal_parts(1536, 128), 4);
  EXPECT_EQ(equal_parts(576, 64), 1);
}

constexpr int64_t kColumns = 96;
constexpr int64_t kRows = 300;
constexpr int64_t kOutputs = 7;
constexpr int kBlock = 32;

/// |W_b (x_b - Q(x_b))|^2 over all rows, in double precision.
double cost_by_hand(const std::vector<float>& x,
                    const std::vector<float>& w,
                    int64_t block,
                    std::pair<int, float> bits_and_clip) {
  double cost = 0;
  for (int64_t row = 0; row < kRows; ++row) {
    const float* from = x.data() + row * kColumns + block * kBlock;
    float largest = 0;
    for (int64_t i = 0; i < kBlock; ++i) {
      largest = std::max(largest, std::fabs(from[i]));
    }
    const auto [bits, clip] = bits_and_clip;
    const double top = bits == 4 ? 7 : 127;
    const double scale = static_cast<double>(clip) * static_cast<double>(largest) / top;
    for (int64_t n = 0; n < kOutputs; ++n) {
      double change = 0;
      for (int64_t i = 0; i < kBlock; ++i) {
        const auto number = static_cast<double>(from[i]);
        const double code = std::clamp(std::nearbyint(number / scale), -top, top);
        change += static_cast<double>(w[static_cast<size_t>(n * kColumns + block * kBlock + i)]) *
                  (number - code * scale);
      }
      cost += change * change;
    }
  }
  return cost;
}

TEST(BlockErrors, AreWhatRoundingChangesInOutputs) {
  const std::vector<float> x = correlated(kRows, kColumns, 3);
  const std::vector<float> w = gaussian(kOutputs * kColumns, 9);
  ThreadPool pool(2);
  BlockErrors errors(kColumns, {.block = kBlock});
  errors.add(x.data(), 100, pool);
  errors.add(x.data() + 100 * kColumns, kRows - 100, pool);
  BlockCosts costs;
  errors.add_costs(w.data(), 3, costs, pool);  // some rows, then the others
  errors.add_costs(w.data() + 3 * kColumns, kOutputs - 3, costs, pool);
  ASSERT_EQ(costs.low.size(), 3U);
  for (int64_t block = 0; block < errors.blocks(); ++block) {
    const auto at = static_cast<size_t>(block);
    const double eight = cost_by_hand(x, w, block, {8, 1.0F});
    EXPECT_NEAR(costs.high[at], eight, 0.01 * eight);
    for (size_t clip = 0; clip < kClips.size(); ++clip) {
      const double four = cost_by_hand(x, w, block, {4, kClips[clip]});
      EXPECT_NEAR(costs.low[at][clip], four, 0.01 * four) << block << ' ' << clip;
    }
  }
}

/// Of one row, for an output that adds it up; one block of three is expected to have more bits.
BlockCosts costs_beside_ones(const std::vector<float>& x, BlockScales scales) {
  const std::vector<float> w(kColumns, 1);
  ThreadPool pool(1);
  BlockErrors errors(kColumns, {.block = kBlock, .scales = scales, .outlier_share = 0.3});
  errors.add(x.data(), 1, pool);
  BlockCosts costs;
  errors.add_costs(w.data(), 1, costs, pool);
  return costs;
}

double square(double change) { return change * change; }

// Of three blocks one is expected to have 8 bits: the scale of 4 bits is that of the second
// largest.
TEST(BlockErrors, OfClassesHaveOneScaleForARow) {
  std::vector<float> x(kColumns, 0.5F);
  x[0] = 100;
  x[40] = 7;
  const BlockCosts costs = costs_beside_ones(x, BlockScales::kClass);
  // With a scale of 1 halves become 0, as the nearest even number, and 100 becomes 7.
  EXPECT_NEAR(costs.low[0].back(), square(93 + 31 * 0.5), 1e-2);
  EXPECT_NEAR(costs.low[1].back(), square(31 * 0.5), 1e-2);
  EXPECT_NEAR(costs.low[2].back(), square(32 * 0.5), 1e-2);
  const double coarse = 0.5 - 100.0 / 127;  // of 8 bits for all
  EXPECT_NEAR(costs.high[2], square(32 * coarse), 1e-2);
}

// Of two blocks of 8 bits the scale is that of the largest one that is not expected to be in BF16.
TEST(BlockErrors, BesideBf16BlocksOf8BitsHaveOneScaleAndNoClips) {
  std::vector<float> x(kColumns, 0.0F);
  x[0] = 1000;
  x[1] = 0.25F;
  x[40] = 127;
  x[41] = 0.25F;
  x[90] = 0.375F;
  const BlockCosts costs = costs_beside_ones(x, BlockScales::kWide);
  EXPECT_NEAR(costs.low[0].back(), square(1000 - 127 + 0.25), 1e-2);  // codes of 127 and 0
  EXPECT_NEAR(costs.low[1].back(), square(0.25), 1e-6);
  EXPECT_NEAR(costs.low[2].back(), square(0.375), 1e-6);
  EXPECT_EQ(costs.low[0].front(), std::numeric_limits<double>::infinity());
  EXPECT_EQ(costs.high, (std::vector<double>{0, 0, 0}));  // in BF16 all are as they were
}

TEST(BlockErrors, DoNotDependOnThreads) {
  const std::vector<float> x = correlated(kRows, kColumns, 4);
  const std::vector<float> w = gaussian(kOutputs * kColumns, 5);
  const auto costs = [&](int threads) {
    ThreadPool pool(threads);
    BlockErrors errors(kColumns, {.block = kBlock});
    errors.add(x.data(), kRows, pool);
    BlockCosts costs;
    errors.add_costs(w.data(), kOutputs, costs, pool);
    return costs;
  };
  const BlockCosts one = costs(1);
  const BlockCosts three = costs(3);
  EXPECT_EQ(one.low, three.low);
  EXPECT_EQ(one.high, three.high);
}

}  // namespace
}  // namespace nibble
