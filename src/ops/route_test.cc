#include "ops/route.h"

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace nibble {
namespace {

struct Routed {
  std::vector<int32_t> chosen;
  std::vector<float> weights;
};

template <typename Route>
Routed routed(const Route& function, RouteArgs args, size_t top_k) {
  Routed result{std::vector<int32_t>(top_k), std::vector<float>(top_k)};
  args.chosen = result.chosen;
  args.weights = result.weights;
  function(args);
  return result;
}

std::vector<float> random_logits(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  std::vector<float> values(count);
  std::ranges::generate(values, [&] { return normal(random); });
  return values;
}

TEST(Route, EqualsTheReferenceInEveryForm) {
  const RouterForm forms[] = {
      {},
      {.renormalise = true},
      {.scores = RouterScores::kSoftmaxOfChosen},
      {.scores = RouterScores::kSigmoid, .renormalise = true, .epsilon = 1e-20F, .factor = 2.5F},
      {.scores = RouterScores::kSigmoid,
       .renormalise = true,
       .factor = 2.827F,
       .groups = 8,
       .kept_groups = 4}};
  uint32_t seed = 0;
  for (const RouterForm& form : forms) {
    for (const size_t experts : {8, 64, 384}) {
      for (const size_t top_k : {1, 4, 8}) {
        const size_t of_group = experts / static_cast<size_t>(form.groups);
        if (of_group < 2 || top_k > of_group * static_cast<size_t>(form.kept_groups)) {
          continue;
        }
        const std::vector<float> logits = random_logits(experts, ++seed);
        const std::vector<float> correction = form.scores == RouterScores::kSigmoid
                                                  ? random_logits(experts, ++seed)
                                                  : std::vector<float>();
        const RouteArgs args{.logits = logits, .correction = correction, .form = form};
        const Routed got = routed(route, args, top_k);
        const Routed expected = routed(reference_route, args, top_k);
        EXPECT_EQ(got.chosen, expected.chosen);
        for (size_t i = 0; i < top_k; ++i) {
          EXPECT_NEAR(got.weights[i], expected.weights[i], 1e-6F * form.factor);
        }
      }
    }
  }
}

// With a correction near 12 and scores near 1e-8 the weights are still the scores.
TEST(Route, CorrectionsDoNotWeigh) {
  const std::vector<float> logits = {-18.0F, -18.5F, -19.0F, -17.0F};
  const std::vector<float> correction = {12.0F, 11.0F, 13.0F, 0.0F};
  const Routed got = routed(
      route,
      {.logits = logits, .correction = correction, .form = {.scores = RouterScores::kSigmoid}}, 2);
  EXPECT_EQ(got.chosen, (std::vector<int32_t>{2, 0}));
  EXPECT_NEAR(got.weights[0], 5.6027964e-9F, 1e-14F);
  EXPECT_NEAR(got.weights[1], 1.5229981e-8F, 1e-14F);
}

TEST(Route, EqualScoresAndNansChooseDifferentExperts) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const std::vector<float>& logits :
       {std::vector<float>(8, 1.0F), std::vector<float>(8, kNan),
        std::vector<float>{0, kNan, 0, kNan, 0, kNan, 0, kNan}}) {
    for (const RouterScores scores :
         {RouterScores::kSoftmax, RouterScores::kSoftmaxOfChosen, RouterScores::kSigmoid}) {
      const RouterForm form{.scores = scores, .groups = 4, .kept_groups = 2};
      const Routed got = routed(route, {.logits = logits, .form = form}, 4);
      EXPECT_EQ(std::set<int32_t>(got.chosen.begin(), got.chosen.end()).size(), 4U);
      EXPECT_GE(*std::ranges::min_element(got.chosen), 0);
      EXPECT_LT(*std::ranges::max_element(got.chosen), 8);
    }
  }
  const std::vector<float> equal(8, 1.0F);
  EXPECT_EQ(routed(route, {.logits = equal}, 3).chosen, (std::vector<int32_t>{0, 1, 2}));
}

}  // namespace
}  // namespace nibble
