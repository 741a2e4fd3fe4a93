#include "ops/sampler.h"

#include <cmath>
#include <limits>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ops/sampling.h"

namespace nibble {
namespace {

using Seen = std::unordered_map<int32_t, int32_t>;
using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;

constexpr int kDraws = 20000;

// Frequencies of the tokens over many draws.
std::map<int32_t, double> frequencies(const std::vector<float>& logits,
                                      const SamplingParams& params,
                                      const Seen& seen = {}) {
  Sampler sampler(static_cast<int64_t>(logits.size()));
  std::map<int32_t, double> out;
  for (int i = 0; i < kDraws; ++i) {
    std::vector<float> row = logits;
    auto sampled = sampler.sample(row, {.params = params, .seed = 3, .step = i, .seen = seen});
    EXPECT_TRUE(sampled.ok());
    out[sampled->token] += 1.0 / kDraws;
  }
  return out;
}

std::vector<int32_t> keys(const std::map<int32_t, double>& map) {
  std::vector<int32_t> out;
  for (const auto& [key, value] : map) {
    out.push_back(key);
  }
  return out;
}

SampledToken sample(std::vector<float> logits, const SamplerInput& input) {
  Sampler sampler(static_cast<int64_t>(logits.size()));
  auto sampled = sampler.sample(logits, input);
  EXPECT_TRUE(sampled.ok());
  return std::move(sampled).value();
}

// Probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625.
const std::vector<float> kLogits = {0.0F, std::log(0.5F), std::log(0.25F), std::log(0.125F),
                                    std::log(0.125F)};

// By hand: the probabilities are those above kLogits.
TEST(Sampler, ScoresATokenThatItDidNotChoose) {
  Sampler sampler(5);
  const ScoredToken third = sampler.score(kLogits, 2, 2).value();
  EXPECT_EQ(third.rank, 3);
  EXPECT_NEAR(third.logprob, std::log(0.125), 1e-6);
  ASSERT_EQ(third.top_logprobs.size(), 2U);
  EXPECT_EQ(third.top_logprobs[1].token, 1);
  EXPECT_NEAR(third.top_logprobs[1].logprob, std::log(0.25), 1e-6);
  const ScoredToken last = sampler.score(kLogits, 4, 0).value();  // as likely as the one before
  EXPECT_EQ(last.rank, 5);
  EXPECT_EQ(sampler.score(kLogits, 3, 0)->rank, 4);
  EXPECT_TRUE(last.top_logprobs.empty());
  const std::vector<float> broken = {0.0F, std::numeric_limits<float>::infinity()};
  EXPECT_EQ(Sampler(2).score(broken, 0, 1).status().code(), StatusCode::kCorrupt);
}

TEST(Sampler, GreedyTakesTheFirstOfTheLargest) {
  const SamplingParams params{.temperature = 0};
  const Seen seen;
  EXPECT_EQ(sample({1, 3, 2, 3}, {.params = params, .seen = seen}).token, 1);
  const std::vector<int32_t> banned = {1};
  EXPECT_EQ(sample({1, 3, 2, 3}, {.params = params, .seen = seen, .banned = banned}).token, 3);
}

TEST(Sampler, DrawsFromTheDistribution) {
  const auto plain = frequencies(kLogits, {});
  EXPECT_NEAR(plain.at(0), 0.5, 0.02);
  EXPECT_NEAR(plain.at(1), 0.25, 0.02);
  EXPECT_NEAR(plain.at(4), 0.0625, 0.01);
  // At temperature 0.5 probabilities are squared: 64 : 16 : 4 : 1 : 1.
  const auto sharp = frequencies(kLogits, {.temperature = 0.5});
  EXPECT_NEAR(sharp.at(0), 64.0 / 86, 0.02);
  EXPECT_NEAR(sharp.at(3), 1.0 / 86, 0.005);
}

TEST(Sampler, FiltersKeepTheLikeliest) {
  EXPECT_THAT(keys(frequencies(kLogits, {.top_k = 2})), ElementsAre(0, 1));
  EXPECT_THAT(keys(frequencies(kLogits, {.top_k = 4})), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(keys(frequencies(kLogits, {.top_p = 0.5})), ElementsAre(0));
  EXPECT_THAT(keys(frequencies(kLogits, {.top_p = 0.51})), ElementsAre(0, 1));
  EXPECT_THAT(keys(frequencies(kLogits, {.top_p = 1e-9})), ElementsAre(0));
  EXPECT_THAT(keys(frequencies(kLogits, {.min_p = 0.25})), ElementsAre(0, 1, 2));
  EXPECT_THAT(keys(frequencies(kLogits, {.min_p = 1})), ElementsAre(0));
  // top-p counts what top-k left: 0.5 of 0.75 is two thirds.
  EXPECT_THAT(keys(frequencies(kLogits, {.top_k = 2, .top_p = 0.6})), ElementsAre(0));
  const auto two = frequencies(kLogits, {.top_k = 2});
  EXPECT_NEAR(two.at(0), 2.0 / 3, 0.02);
}

TEST(Sampler, PenaltiesAndBias) {
  const SamplingParams greedy{.temperature = 0};
  const Seen seen = {{0, 0}, {1, 3}};
  SamplingParams params = greedy;
  params.repetition_penalty = 2;  // positive logits are divided, negative ones multiplied
  EXPECT_EQ(sample({3, 3, 2}, {.params = params, .seen = seen}).token, 2);
  EXPECT_EQ(sample({-3, -3, -5}, {.params = params, .seen = seen}).token, 2);
  params = greedy;
  params.presence_penalty = 1.5;  // of the answer only, once
  EXPECT_EQ(sample({3, 4, 2}, {.params = params, .seen = seen}).token, 0);
  EXPECT_EQ(sample({2, 4, 2}, {.params = params, .seen = seen}).token, 1);
  params = greedy;
  params.frequency_penalty = 1;  // three times
  EXPECT_EQ(sample({2, 4.5, 1}, {.params = params, .seen = seen}).token, 0);
  params = greedy;
  params.logit_bias = {{2, 5.0F}, {1, -100.0F}};
  EXPECT_EQ(sample({2, 9, 1}, {.params = params, .seen = seen}).token, 2);
}

TEST(Sampler, LogprobsAreOfTheRawDistribution) {
  SamplingParams params{.temperature = 0};
  params.logit_bias = {{3, 100.0F}};
  const Seen seen;
  const auto out = sample(kLogits, {.params = params, .seen = seen, .top_logprobs = 3});
  EXPECT_EQ(out.token, 3);
  EXPECT_NEAR(out.logprob, std::log(0.0625), 1e-6);
  ASSERT_EQ(out.top_logprobs.size(), 3U);
  EXPECT_EQ(out.top_logprobs[0].token, 0);
  EXPECT_NEAR(out.top_logprobs[0].logprob, std::log(0.5), 1e-6);
  EXPECT_EQ(out.top_logprobs[2].token, 2);
  EXPECT_NEAR(out.top_logprobs[2].logprob, std::log(0.125), 1e-6);
  EXPECT_TRUE(sample(kLogits, {.params = params, .seen = seen}).top_logprobs.empty());
  EXPECT_NEAR(sample(kLogits, {.params = params, .seen = seen, .top_logprobs = 0}).logprob,
              std::log(0.0625), 1e-6);
  EXPECT_EQ(
      sample(kLogits, {.params = params, .seen = seen, .top_logprobs = 20}).top_logprobs.size(),
      5U);
}

TEST(Sampler, DamagedLogitsAreAnError) {
  const Seen seen;
  for (const double temperature : {0.0, 1.0}) {
    const SamplingParams params{.temperature = temperature};
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity()}) {
      std::vector<float> logits(40, 1.0F);
      logits[17] = bad;
      EXPECT_EQ(Sampler(40).sample(logits, {.params = params, .seen = seen}).status().code(),
                StatusCode::kCorrupt);
    }
    std::vector<float> logits(2, 1.0F);
    const std::vector<int32_t> all = {0, 1};
    const auto none = Sampler(2).sample(logits, {.params = params, .seen = seen, .banned = all});
    EXPECT_EQ(none.status().code(), StatusCode::kInvalidArgument);
  }
}

TEST(Sampler, ExtremeLogitsAndTemperatures) {
  const Seen seen;
  for (const double temperature : {1e-8, 1.0, 100.0}) {
    const SamplingParams params{.temperature = temperature};
    const auto out = sample({-3e38F, 3e38F, 0}, {.params = params, .seen = seen});
    EXPECT_EQ(out.token, 1);
  }
}

TEST(Sampler, UniformIsFixedAndFlat) {
  EXPECT_EQ(draw_uniform(5, 9), draw_uniform(5, 9));
  double mean = 0;
  double lag = 0;
  for (int i = 0; i < 100000; ++i) {
    const double u = draw_uniform(1, i);
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    mean += u / 100000;
    lag += (u - 0.5) * (draw_uniform(2, i) - 0.5) / 100000;
  }
  EXPECT_NEAR(mean, 0.5, 0.005);
  EXPECT_NEAR(lag, 0, 0.002);
}

TEST(Sampler, CheckNamesTheParameter) {
  const auto message = [](const SamplingParams& params) {
    return Sampler::check(params, 10).message();
  };
  EXPECT_EQ(message({}), "");
  EXPECT_THAT(message({.temperature = -1}), ::testing::HasSubstr("temperature"));
  EXPECT_THAT(message({.temperature = std::nan("")}), ::testing::HasSubstr("temperature"));
  EXPECT_THAT(message({.top_k = -1}), ::testing::HasSubstr("top_k"));
  EXPECT_THAT(message({.top_p = 0}), ::testing::HasSubstr("top_p"));
  EXPECT_THAT(message({.min_p = 1.5}), ::testing::HasSubstr("min_p"));
  EXPECT_THAT(message({.repetition_penalty = 0}), ::testing::HasSubstr("repetition_penalty"));
  EXPECT_THAT(message({.logit_bias = {{10, 1.0F}}}), ::testing::HasSubstr("token 10"));
}

TEST(Sampler, MaskLeavesWhatItAllowsAndLogProbabilitiesAsTheyWere) {
  constexpr int64_t kVocab = 70;
  Sampler sampler(kVocab);
  const SamplingParams greedy{.temperature = 0};
  const std::unordered_map<int32_t, int32_t> seen;
  std::vector<float> logits(kVocab);
  for (size_t i = 0; i < logits.size(); ++i) {
    logits[i] = static_cast<float>(i) / 10;
  }
  std::vector<uint32_t> mask = {~0U, 5U, 0U};  // 0..31, 32 and 34
  auto copy = logits;
  const auto masked =
      sampler.sample(copy, {.params = greedy, .seen = seen, .mask = mask, .top_logprobs = 1});
  copy = logits;
  const auto free = sampler.sample(copy, {.params = greedy, .seen = seen, .top_logprobs = 1});
  ASSERT_TRUE(masked.ok() && free.ok());
  EXPECT_EQ(masked->token, 34);
  EXPECT_EQ(masked->top_logprobs[0].token, 69);
  EXPECT_NEAR(masked->logprob - free->logprob, -3.5F, 1e-5);
  copy = logits;
  mask.assign(3, 0);
  EXPECT_FALSE(sampler.sample(copy, {.params = greedy, .seen = seen, .mask = mask}).ok());
}

}  // namespace
}  // namespace nibble
