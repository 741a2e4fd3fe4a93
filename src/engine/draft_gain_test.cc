#include "engine/draft_gain.h"

#include <cmath>

#include <gtest/gtest.h>

namespace nibble {
namespace {

/// Tokens in a second, by summing what each proposal brings.
double speed(const DraftCosts& costs, double acceptance, int64_t sequences, int64_t count) {
  double tokens = 0;
  for (int64_t i = 0; i <= count; ++i) {
    tokens += std::pow(acceptance, static_cast<double>(i));
  }
  const auto n = static_cast<double>(count);
  const auto s = static_cast<double>(sequences);
  return s * tokens / (costs.step + n * costs.pass + n * s * costs.row);
}

TEST(BestDraft, GivesMostTokensInASecond) {
  for (const double pass : {0.05, 0.3, 0.9}) {
    for (const double acceptance : {0.2, 0.7, 0.95}) {
      for (const int64_t sequences : {1, 3}) {
        const DraftCosts costs{.step = 1, .row = 0.02, .pass = pass};
        const int64_t best = best_draft(costs, acceptance, sequences, 8);
        const double plain = speed(costs, acceptance, sequences, 0);
        for (int64_t count = 1; count <= 8; ++count) {
          const double other = speed(costs, acceptance, sequences, count);
          const double chosen =
              best > 0 ? speed(costs, acceptance, sequences, best) : 1.031 * plain;
          EXPECT_LE(other, chosen * 1.000001) << pass << " " << acceptance << " " << count;
        }
      }
    }
  }
  EXPECT_EQ(best_draft({.step = 1, .pass = 0.9}, 0.5, 1, 8), 0);
  EXPECT_EQ(best_draft({.step = 1, .pass = 0.01}, 0.9, 1, 4), 4);
  EXPECT_EQ(best_draft({.step = 1, .pass = 0.01}, 0.9, 1, 0), 0);
}

TEST(DraftGain, LearnsHowOftenProposalsAreRight) {
  DraftGain gain;
  for (int i = 0; i < 100; ++i) {
    gain.learn(4, 4);
  }
  EXPECT_GT(gain.acceptance(), 0.99);
  for (int i = 0; i < 100; ++i) {
    gain.learn(4, 1);  // of two that were tried, one
  }
  EXPECT_NEAR(gain.acceptance(), 0.5, 0.01);
}

TEST(DraftGain, SeldomProposesWhereThatDoesNotPay) {
  const DraftCosts costs{.step = 1, .row = 0.01, .pass = 0.3};
  DraftGain gain;
  int64_t proposals = 0;
  for (int token = 0; token < 2000; ++token) {
    if (const int64_t count = gain.next(costs, 1, 4); count > 0) {
      ++proposals;
      gain.learn(count, 0);
    }
  }
  EXPECT_GE(proposals, 10);
  EXPECT_LT(proposals, 30);
  // It notices when they are right again.
  int64_t longest = 0;
  for (int token = 0; token < 1000; ++token) {
    if (const int64_t count = gain.next(costs, 1, 4); count > 0) {
      gain.learn(count, count);
      longest = std::max(longest, count);
    }
  }
  EXPECT_EQ(longest, 4);
}

TEST(DraftClock, MeasuresEachPartOfAStep) {
  DraftClock clock;
  EXPECT_TRUE(clock.wants_plain_step(1));
  for (int i = 0; i < 20; ++i) {
    clock.note_step(1, 0, 1.0);
  }
  EXPECT_FALSE(clock.wants_plain_step(1));
  EXPECT_TRUE(clock.wants_plain_step(2));  // of two nothing is known
  for (int i = 0; i < 20; ++i) {
    clock.note_step(1, 4, 1.2);
    clock.note_passes(1, 4, 1.6);
  }
  EXPECT_NEAR(clock.costs(1).step, 1.0, 1e-6);
  EXPECT_NEAR(clock.costs(1).row, 0.05, 1e-6);
  EXPECT_NEAR(clock.costs(1).pass, 0.4, 1e-6);
  int64_t plain = 0;
  for (int i = 0; i < 650; ++i) {
    if (clock.wants_plain_step(1)) {
      ++plain;
      clock.note_step(1, 0, 3.0);  // it has become slower
    }
  }
  EXPECT_EQ(plain, 10);
  EXPECT_GT(clock.costs(1).step, 2.0);
}

}  // namespace
}  // namespace nibble
