#include "quantizer/algorithms/drift.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "quantizer/algorithms/testing/rounding_problem.h"

namespace nibble {
namespace {

/// Rows, and what they would be: off by a tenth of what other columns are, and by noise.
struct TwoRows {
  std::vector<float> x;
  std::vector<float> wanted;

  TwoRows(int64_t rows, int64_t k, uint32_t seed)
      : x(correlated(rows, k, seed)), wanted(gaussian(rows * k, seed + 2)) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < k; ++i) {
        float& f = wanted[static_cast<size_t>(row * k + i)];
        f = x[static_cast<size_t>(row * k + i)] +
            0.1F * x[static_cast<size_t>(row * k + (i + 7) % k)] + 0.05F * f;
      }
    }
  }

  [[nodiscard]] Drift drift(int64_t k, ThreadPool& pool) const {
    Drift sums(k);
    sums.add({.x = x.data(), .wanted = wanted.data(), .count = std::ssize(x) / k}, pool);
    return sums;
  }
};

TEST(Drift, EqualsExactSums) {
  ThreadPool pool(2);
  for (const int64_t k : {1, 15, 100, 200}) {
    const TwoRows rows(300, k, 4);
    const Drift drift = rows.drift(k, pool);
    Drift twice(k);
    twice.add_sums(drift, 2);
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        double sum = 0;
        double size = 0;
        for (size_t row = 0; row < rows.x.size(); row += static_cast<size_t>(k)) {
          const auto a = row + static_cast<size_t>(i);
          const double x = rows.x[row + static_cast<size_t>(j)];
          sum += (static_cast<double>(rows.wanted[a]) - rows.x[a]) * x;
          size += std::fabs((static_cast<double>(rows.wanted[a]) - rows.x[a]) * x);
        }
        EXPECT_NEAR(drift.data()[i * drift.stride() + j], sum, 1e-5 * size);
        EXPECT_EQ(twice.data()[i * drift.stride() + j], 2 * drift.data()[i * drift.stride() + j]);
      }
    }
  }
}

TEST(Drift, IsSolvedByTheFactor) {
  ThreadPool pool(2);
  for (const int64_t k : {1, 63, 64, 65, 200}) {
    const TwoRows rows(4 * k, k, 8);
    const Drift drift = rows.drift(k, pool);
    const auto factor = make_column_factor(gram_of(rows.x, k, pool), pool);
    ASSERT_TRUE(factor.has_value());
    const std::vector<float> z = solve_drift(drift, *factor, pool);
    const auto at = [&](int64_t i, int64_t j) {
      return static_cast<size_t>(i * drift.stride() + j);
    };
    for (int64_t i = 0; i < k; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        double sum = 0;
        double size = 0;
        for (int64_t t = j; t < k; ++t) {
          const double product = static_cast<double>(z[at(i, t)]) * factor->triangle[at(j, t)];
          sum += product / kDriftShare;
          size += std::fabs(product) / kDriftShare;
        }
        const float expected = drift.data()[at(factor->order[static_cast<size_t>(i)],
                                               factor->order[static_cast<size_t>(j)])];
        EXPECT_NEAR(sum, expected, 1e-5 * (size + std::fabs(expected))) << k;
      }
    }
  }
}

TEST(Drift, GptaqRoundsWhatIsAskedFor) {
  ThreadPool pool(2);
  for (const QuantScheme& scheme : schemes()) {
    constexpr int64_t kK = 384;  // three blocks of columns
    const Problem problem(scheme, 21, kK, 7);
    const TwoRows rows(500, kK, 11);
    const Gram gram = gram_of(rows.x, kK, pool);
    const Drift drift = rows.drift(kK, pool);
    const SiteStatistics site = make_site_statistics(gram, Rounding::kGptaq, pool, &drift);
    const RoundedMatrix rounded = by_columns(problem, Rounding::kGptaq, site, pool);
    const PublishedRows both{rows.x, rows.wanted};
    const std::vector<double> expected = published_values(problem.matrix, both, rounded);
    size_t equal = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      equal += std::fabs(expected[i] - rounded.values[i]) < 1e-4 ? 1 : 0;
    }
    EXPECT_GT(equal, expected.size() * 9 / 10) << scheme.name;
    const double wanted = measured_error(problem.matrix, both, expected);
    EXPECT_NEAR(measured_error(problem.matrix, both, rounded.values) / wanted, 1, 0.01)
        << scheme.name;
    const RoundedMatrix without = by_columns(problem, Rounding::kGptq, site, pool);
    EXPECT_NE(without.values, rounded.values) << scheme.name;
    EXPECT_LT(measured_error(problem.matrix, both, rounded.values),
              measured_error(problem.matrix, both, without.values))
        << scheme.name;
    const RoundedMatrix refined = round_matrix(problem.matrix, Rounding::kGptaq, site, pool);
    EXPECT_EQ(refined.rounding, Rounding::kGptaq) << scheme.name;
    EXPECT_LT(measured_error(problem.matrix, both, refined.values),
              1.001 * measured_error(problem.matrix, both, rounded.values))
        << scheme.name;
  }
}

// Errors differ by what the distances to the unrounded outputs differ by.
TEST(Drift, IsPartOfTheErrors) {
  ThreadPool pool(2);
  constexpr int64_t kK = 256;
  const Problem problem(find_scheme("w4a16_g32").value(), 70, kK, 3);
  const TwoRows rows(700, kK, 5);
  const Gram gram = gram_of(rows.x, kK, pool);
  const Drift drift = rows.drift(kK, pool);
  const SiteStatistics site = make_site_statistics(gram, Rounding::kGptaq, pool, &drift);
  const RoundedMatrix rounded = round_matrix(problem.matrix, Rounding::kGptaq, site, pool);
  const RoundedMatrix nearest = round_matrix(problem.matrix, Rounding::kRtn, site, pool);
  const PublishedRows both{rows.x, rows.wanted};
  const double gained = measured_error(problem.matrix, both, nearest.values) -
                        measured_error(problem.matrix, both, rounded.values);
  EXPECT_NEAR((rounded.rtn_error - rounded.error) * rounded.outputs / gained, 1, 1e-3);
  EXPECT_GT(rounded.error, 0);
}

// It is kept only where it loses less against the unrounded outputs, and needs a drift at all.
TEST(Drift, NothingDriftedIsGptq) {
  ThreadPool pool(2);
  constexpr int64_t kK = 128;
  const Problem problem(find_scheme("w4a16_g32").value(), 20, kK, 3);
  const std::vector<float> x = correlated(300, kK, 5);
  const Gram gram = gram_of(x, kK, pool);
  Drift none(kK);
  none.add({.x = x.data(), .wanted = x.data(), .count = 300}, pool);
  const SiteStatistics with = make_site_statistics(gram, Rounding::kGptaq, pool, &none);
  const SiteStatistics without = make_site_statistics(gram, Rounding::kGptaq, pool);
  const RoundedMatrix gptq = round_matrix(problem.matrix, Rounding::kGptq, without, pool);
  const RoundedMatrix gptaq = round_matrix(problem.matrix, Rounding::kGptaq, with, pool);
  EXPECT_EQ(gptaq.values, gptq.values);
  EXPECT_EQ(gptaq.rounding, Rounding::kGptaq);
  EXPECT_EQ(round_matrix(problem.matrix, Rounding::kGptaq, without, pool).rounding,
            Rounding::kGptq);
}

TEST(Drift, DoesNotDependOnThreads) {
  ThreadPool one(1);
  ThreadPool three(3);
  const Problem problem(find_scheme("w4a16_g32_asym").value(), 130, 224, 3);
  const TwoRows rows(300, 224, 5);
  std::vector<RoundedMatrix> results;
  for (ThreadPool* pool : {&one, &three}) {
    const Gram gram = gram_of(rows.x, 224, *pool);
    const Drift drift = rows.drift(224, *pool);
    const SiteStatistics site = make_site_statistics(gram, Rounding::kGptaq, *pool, &drift);
    results.push_back(round_matrix(problem.matrix, Rounding::kGptaq, site, *pool));
  }
  EXPECT_EQ(results[0].values, results[1].values);
  EXPECT_EQ(results[0].error, results[1].error);
}

}  // namespace
}  // namespace nibble
