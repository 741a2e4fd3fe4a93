#include "quantizer/budget/knapsack.h"

#include <algorithm>
#include <limits>
#include <random>

#include <gtest/gtest.h>

namespace nibble {
namespace {

using Units = std::vector<std::vector<KnapsackChoice>>;

/// The least loss within the capacity, by trying everything.
double least_loss(const Units& units, int64_t capacity, size_t from = 0) {
  if (from == units.size()) {
    return 0;
  }
  double least = std::numeric_limits<double>::infinity();
  for (const KnapsackChoice& choice : units[from]) {
    if (choice.size <= capacity) {
      least = std::min(least, choice.loss + least_loss(units, capacity - choice.size, from + 1));
    }
  }
  return least;
}

Units random_units(size_t count, std::mt19937& random) {
  std::uniform_int_distribution<int64_t> size(1, 60);
  std::uniform_real_distribution<double> loss(0.0, 1.0);
  Units units(count);
  for (auto& unit : units) {
    for (int i = 0; i < 4; ++i) {
      unit.push_back({size(random), loss(random)});
    }
  }
  return units;
}

/// Units of many sizes whose losses fall as those of schemes do.
Units like_schemes(size_t count, std::mt19937& random) {
  std::lognormal_distribution<double> weight(0.0, 1.5);
  std::uniform_int_distribution<int64_t> width(1, 12);
  Units units(count);
  for (auto& unit : units) {
    const double w = weight(random);
    const int64_t n = 64 * width(random);
    unit = {{33 * n, w}, {36 * n, 0.7 * w}, {37 * n, 0.62 * w}, {64 * n, 0.004 * w}, {128 * n, 0}};
  }
  return units;
}

TEST(Knapsack, FindsTheBestOfAll) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const Units units = random_units(5, random);
    const int64_t capacity = 60 + 4 * (round % 40);
    const double best = least_loss(units, capacity);
    const auto found = solve_knapsack(units, capacity);
    if (best == std::numeric_limits<double>::infinity()) {
      EXPECT_FALSE(found.ok());
      continue;
    }
    ASSERT_TRUE(found.ok());
    EXPECT_LE(found->size, capacity);
    EXPECT_LE(found->bound, best + 1e-12);
    EXPECT_NEAR(found->loss, best, 1e-12);
    double sum = 0;
    for (size_t unit = 0; unit < units.size(); ++unit) {
      sum += units[unit][found->chosen[unit]].loss;
    }
    EXPECT_DOUBLE_EQ(sum, found->loss);
  }
}

/// The largest loss that one step of a unit can save: the bound is not further away than this.
double largest_loss(const Units& units) {
  double most = 0;
  for (const auto& unit : units) {
    most = std::max(most, unit.front().loss);
  }
  return most;
}

TEST(Knapsack, IsWithinAPercentOfItsBoundOnManyMatrices) {
  std::mt19937 random(11);
  for (const size_t count : {32, 120, 400}) {
    Units units = like_schemes(count, random);
    for (auto& unit : units) {  // sizes without a common part
      unit[1].size += count == 400 ? 1 : 0;
    }
    int64_t least = 0;
    int64_t most = 0;
    for (const auto& unit : units) {
      least += unit.front().size;
      most += unit[3].size;
    }
    double before = std::numeric_limits<double>::infinity();
    for (int step = 1; step < 12; ++step) {
      const int64_t capacity = least + (most - least) * step / 12;
      const auto found = solve_knapsack(units, capacity);
      ASSERT_TRUE(found.ok());
      EXPECT_LE(found->size, capacity);
      EXPECT_LE(found->loss, found->bound + 0.05 * largest_loss(units)) << count << ", " << step;
      if (count >= 120 && step <= 9) {
        EXPECT_LE(found->loss, 1.01 * found->bound) << count << " units, step " << step;
      }
      EXPECT_GE(found->loss, found->bound - 1e-9);
      EXPECT_LE(found->loss, before);
      before = found->loss;
    }
  }
}

TEST(Knapsack, SaysWhatTheSmallestTake) {
  const auto found = solve_knapsack({{{10, 1.0}, {20, 0.5}}, {{7, 1.0}}}, 16);
  ASSERT_FALSE(found.ok());
  EXPECT_EQ(found.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(found.status().message().find("17"), std::string::npos);
  const auto fits = solve_knapsack({{{10, 1.0}, {20, 0.5}}, {{7, 1.0}}}, 17);
  ASSERT_TRUE(fits.ok());
  EXPECT_EQ(fits->size, 17);
  EXPECT_DOUBLE_EQ(fits->bound, 2.0);
}

}  // namespace
}  // namespace nibble
