#include "bench/client/arrivals.h"

#include <algorithm>
#include <cmath>
#include <set>

#include <gtest/gtest.h>

#include "bench/client/paired_ratio.h"
#include "bench/client/prompts.h"

namespace nibble {
namespace {

// Mean and standard deviation of the gaps between requests.
std::pair<double, double> gaps_of(const std::vector<double>& times) {
  double sum = 0;
  double squares = 0;
  for (size_t i = 1; i < times.size(); ++i) {
    const double gap = times[i] - times[i - 1];
    EXPECT_GE(gap, 0);
    sum += gap;
    squares += gap * gap;
  }
  const auto count = static_cast<double>(times.size() - 1);
  const double mean = sum / count;
  return {mean, std::sqrt(squares / count - mean * mean)};
}

TEST(Arrivals, AllAtOnce) {
  EXPECT_TRUE(arrival_times(10, {}, LoadTiming::kVllm).empty());
  EXPECT_TRUE(arrival_times(0, {.rate = 3}, LoadTiming::kVllm).empty());
}

TEST(Arrivals, TheLastComesAtCountOverRate) {
  for (const double burstiness : {0.2, 1.0, 7.0}) {
    const auto times =
        arrival_times(500, {.rate = 25, .burstiness = burstiness, .seed = 3}, LoadTiming::kVllm);
    ASSERT_EQ(times.size(), 500u);
    EXPECT_NEAR(times.back(), 20, 1e-9) << burstiness;
  }
}

// A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
TEST(Arrivals, BurstinessIsTheShape) {
  for (const double burstiness : {0.25, 1.0, 4.0}) {
    const auto times =
        arrival_times(20000, {.rate = 10, .burstiness = burstiness, .seed = 1}, LoadTiming::kVllm);
    const auto [mean, deviation] = gaps_of(times);
    EXPECT_NEAR(mean, 0.1, 0.001);
    EXPECT_NEAR(deviation / mean, 1 / std::sqrt(burstiness), 0.05 / std::sqrt(burstiness));
  }
}

TEST(Arrivals, SglangBeginsAtOnceAndIsNotScaled) {
  const auto times = arrival_times(20000, {.rate = 10, .seed = 2}, LoadTiming::kSglang);
  EXPECT_EQ(times.front(), 0);
  EXPECT_NEAR(gaps_of(times).first, 0.1, 0.003);
  EXPECT_NE(times.back(), 2000);
}

TEST(Arrivals, SeedsDecide) {
  const ArrivalOptions one{.rate = 5, .seed = 1};
  const ArrivalOptions two{.rate = 5, .seed = 2};
  EXPECT_EQ(arrival_times(50, one, LoadTiming::kVllm), arrival_times(50, one, LoadTiming::kVllm));
  EXPECT_NE(arrival_times(50, one, LoadTiming::kVllm), arrival_times(50, two, LoadTiming::kVllm));
}

TEST(Arrivals, RatesRampUp) {
  for (const RampUp ramp : {RampUp::kLinear, RampUp::kExponential}) {
    const auto times = arrival_times(
        8000, {.ramp_up = ramp, .ramp_start = 10, .ramp_end = 1000, .seed = 1}, LoadTiming::kVllm);
    const std::vector<double> begin(times.begin(), times.begin() + 200);
    const std::vector<double> end(times.end() - 200, times.end());
    EXPECT_GT(gaps_of(begin).first, 15 * gaps_of(end).first);
    EXPECT_NEAR(gaps_of(end).first, 0.001, 0.0003);
  }
}

TEST(PairedRatio, KnownValues) {
  // Logarithms of the ratios: ln 1.1, ln 1.2, ln 1.3; by hand: mean 0.180059, error 0.048230.
  const double a[] = {1, 2, 10};
  const double b[] = {1.1, 2.4, 13};
  const PairedRatio found = paired_ratio(a, b);
  EXPECT_NEAR(found.ratio, std::cbrt(1.1 * 1.2 * 1.3), 1e-12);
  ASSERT_TRUE(found.interval.has_value());
  EXPECT_NEAR(std::log(found.interval->high) - std::log(found.ratio), 4.303 * 0.048230, 1e-4);
  EXPECT_NEAR(found.ratio / found.interval->low, found.interval->high / found.ratio, 1e-9);
}

TEST(PairedRatio, OnePairHasNoInterval) {
  const double a[] = {2, 0};
  const double b[] = {4, 1};
  EXPECT_DOUBLE_EQ(paired_ratio(a, b).ratio, 2);
  EXPECT_FALSE(paired_ratio(a, b).interval.has_value());
}

TEST(PairedRatio, StudentBeyondTheTable) {
  EXPECT_NEAR(student_95(40), 2.021, 0.001);  // from tables
  EXPECT_NEAR(student_95(120), 1.980, 0.001);
}

TEST(Prompts, BothMeaningsOfTheRatio) {
  const auto sglang = length_range(100, 0.25, RangeSemantics::kSglang);
  EXPECT_EQ(sglang->low, 25);
  EXPECT_EQ(sglang->high, 100);
  EXPECT_EQ(length_range(100, 0, RangeSemantics::kSglang)->low, 1);
  EXPECT_EQ(length_range(100, 1, RangeSemantics::kSglang)->low, 100);
  const auto vllm = length_range(99, 0.5, RangeSemantics::kVllm);
  EXPECT_EQ(vllm->low, 49);
  EXPECT_EQ(vllm->high, 149);
  EXPECT_EQ(length_range(99, 0, RangeSemantics::kVllm)->high, 99);
  EXPECT_FALSE(length_range(9, 1, RangeSemantics::kVllm).ok());
  EXPECT_FALSE(length_range(9, -0.1, RangeSemantics::kSglang).ok());
}

TEST(Prompts, RandomIdsAreDistinctAndOfTheirLengths) {
  const auto prompts = random_prompts({.count = 200,
                                       .seed = 4,
                                       .input_len = 30,
                                       .output_len = 8,
                                       .prefix_len = 5,
                                       .range_ratio = 0.5,
                                       .vocab_size = 1000});
  ASSERT_TRUE(prompts.ok());
  std::set<std::vector<int32_t>> seen;
  std::set<int64_t> lengths;
  for (const Prompt& prompt : *prompts) {
    EXPECT_EQ(std::ssize(prompt.ids), prompt.input_len);
    EXPECT_GE(prompt.input_len, 5 + 15);
    EXPECT_LE(prompt.input_len, 5 + 45);
    EXPECT_GE(prompt.output_len, 4);
    EXPECT_LE(prompt.output_len, 12);
    EXPECT_TRUE(
        std::equal(prompt.ids.begin(), prompt.ids.begin() + 5, prompts->front().ids.begin()));
    seen.insert(prompt.ids);
    lengths.insert(prompt.input_len);
  }
  EXPECT_EQ(seen.size(), 200u);
  EXPECT_GT(lengths.size(), 20u);
}

TEST(Prompts, RandomTextHasAsManyTokensAsAsked) {
  const auto tokenizer = Tokenizer::load("models/storyteller");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const auto prompts = random_prompts(
      {.count = 50, .seed = 1, .input_len = 64, .output_len = 4, .tokenizer = tokenizer->get()});
  ASSERT_TRUE(prompts.ok());
  std::set<std::string> seen;
  for (const Prompt& prompt : *prompts) {
    const auto ids = (*tokenizer)->encode_prompt(prompt.text);
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(std::ssize(*ids), prompt.input_len);
    EXPECT_NEAR(static_cast<double>(prompt.input_len), 64, 2);
    seen.insert(prompt.text);
  }
  EXPECT_EQ(seen.size(), 50u);
}

TEST(Prompts, WithoutAVocabularyThereAreNone) {
  EXPECT_EQ(random_prompts({.count = 1}).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace nibble
