#include "eval/statistics.h"

#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "eval/probabilities.h"

namespace nibble {
namespace {

TEST(Statistics, EstimateIsMeanAndStandardError) {
  const std::vector<double> values = {1, 2, 4, 9};  // squares about 4: 9 + 4 + 0 + 25
  EXPECT_DOUBLE_EQ(estimate_of(values).mean, 4);
  EXPECT_DOUBLE_EQ(estimate_of(values).error, std::sqrt(38.0 / 3 / 4));
  EXPECT_EQ(estimate_of(std::vector<double>{3}).mean, 3);
  EXPECT_EQ(estimate_of(std::vector<double>{3}).error, 0);
  EXPECT_EQ(estimate_of({}).mean, 0);
}

// Two models that agree but for one question differ by much less than their own errors.
TEST(Statistics, PairedDifferenceForgetsWhatBothShare) {
  const std::vector<double> a = {1, 0, 1, 0, 1, 1, 0, 1};
  std::vector<double> b = a;
  EXPECT_EQ(paired_difference(a, b).error, 0);
  b[2] = 0;
  EXPECT_DOUBLE_EQ(paired_difference(a, b).mean, 0.125);
  EXPECT_DOUBLE_EQ(paired_difference(a, b).error, 0.125);  // sqrt((7/64 + 49/64) / 7 / 8)
  EXPECT_LT(paired_difference(a, b).error, estimate_of(a).error);
}

TEST(Statistics, RootMeanSquare) {
  const std::vector<double> values = {3, -4, 3, -4};  // mean square 12.5
  EXPECT_DOUBLE_EQ(root_mean_square(values).mean, std::sqrt(12.5));
  const double error_of_square = std::sqrt(4 * 3.5 * 3.5 / 3 / 4);
  EXPECT_DOUBLE_EQ(root_mean_square(values).error, error_of_square / (2 * std::sqrt(12.5)));
  EXPECT_EQ(root_mean_square(std::vector<double>{0, 0}).error, 0);
}

// numpy.quantile([1, 2, 4, 9], [0, .5, .9, 1])
TEST(Statistics, QuantilesAreInterpolated) {
  const std::vector<double> sorted = {1, 2, 4, 9};
  EXPECT_DOUBLE_EQ(quantile(sorted, 0), 1);
  EXPECT_DOUBLE_EQ(quantile(sorted, 0.5), 3);
  EXPECT_DOUBLE_EQ(quantile(sorted, 0.9), 7.5);
  EXPECT_DOUBLE_EQ(quantile(sorted, 1), 9);
}

// The definition in long double, term by term.
TEST(Probabilities, DivergenceEqualsItsDefinition) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0, 6);
  for (const size_t vocab : {2U, 3U, 17U, 1000U}) {
    std::vector<float> base(vocab);
    std::vector<float> other(vocab);
    for (size_t i = 0; i < vocab; ++i) {
      base[i] = normal(random) + 300;  // a common shift changes no probability
      other[i] = base[i] - 500 + 0.1F * normal(random);
    }
    std::vector<long double> p(vocab);
    std::vector<long double> q(vocab);
    long double sum_p = 0;
    long double sum_q = 0;
    for (size_t i = 0; i < vocab; ++i) {
      sum_p += p[i] = std::exp(static_cast<long double>(base[i]) - 300);
      sum_q += q[i] = std::exp(static_cast<long double>(other[i]) + 200);
    }
    long double kl = 0;
    for (size_t i = 0; i < vocab; ++i) {
      kl += p[i] / sum_p * std::log(p[i] / sum_p / (q[i] / sum_q));
    }
    const TokenDivergence found = compare_logits(base, other, 1);
    EXPECT_NEAR(found.kl, static_cast<double>(kl), 1e-12);
    EXPECT_NEAR(found.base_nll, static_cast<double>(-std::log(p[1] / sum_p)), 1e-12);
    EXPECT_NEAR(found.nll, static_cast<double>(-std::log(q[1] / sum_q)), 1e-12);
    EXPECT_EQ(found.same_top, top_token(base) == top_token(other));
  }
}

TEST(Probabilities, OfAModelWithItselfThereIsNoDivergence) {
  const std::vector<float> logits = {-2, 7, 7, 0.5F};
  const TokenDivergence found = compare_logits(logits, logits, 3);
  EXPECT_NEAR(found.kl, 0, 1e-15);
  EXPECT_EQ(found.nll, found.base_nll);
  EXPECT_TRUE(found.same_top);
  EXPECT_EQ(top_token(logits), 1);  // the first of equals
}

}  // namespace
}  // namespace nibble
