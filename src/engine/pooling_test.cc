#include <atomic>
#include <vector>

#include <gtest/gtest.h>

#include "engine/engine_core.h"
#include "engine/testing/core_runs.h"

namespace nibble {
namespace {

Request pooled(std::vector<int32_t> prompt, Pooling pooling, Answer& answer) {
  Request request = greedy(std::move(prompt), 0, answer);
  request.pooling = pooling;
  return request;
}

/// The hidden state behind a prompt, of a request alone and in one step.
std::vector<float> state_behind(std::vector<int32_t> prompt) {
  Answer unused;
  return alone(pooled(std::move(prompt), Pooling::kLast, unused)).events.back().pooled;
}

/// The oracle: the mean over the states behind each beginning of the prompt.
std::vector<float> mean_state(const std::vector<int32_t>& prompt) {
  std::vector<double> sum(4);
  for (size_t length = 1; length <= prompt.size(); ++length) {
    const auto end = prompt.begin() + static_cast<std::ptrdiff_t>(length);
    const std::vector<float> state = state_behind({prompt.begin(), end});
    EXPECT_EQ(state.size(), sum.size());
    for (size_t i = 0; i < sum.size(); ++i) {
      sum[i] += state[i];
    }
  }
  std::vector<float> out(sum.size());
  for (size_t i = 0; i < sum.size(); ++i) {
    out[i] = static_cast<float>(sum[i] / static_cast<double>(prompt.size()));
  }
  return out;
}

void expect_pooled(const Answer& answer, const std::vector<float>& expected) {
  ASSERT_EQ(answer.events.size(), 1U);
  EXPECT_EQ(answer.finish, FinishReason::kLength) << answer.error;
  EXPECT_EQ(answer.events[0].pooled, expected);
}

// Longer than a step, shorter than a page, of one token; beside requests that generate.
TEST(Pooling, IsThatOfEachTokenAlone) {
  const auto core = make_core(small_options(64));
  Answer plain;
  core->add(greedy(prompt_of(20, 7), 9, plain));
  std::vector<Answer> last(4), mean(4);
  for (size_t i = 0; i < 4; ++i) {
    const auto prompt = prompt_of(std::vector<size_t>{30, 3, 1, 13}[i], static_cast<int32_t>(i));
    core->add(pooled(prompt, Pooling::kLast, last[i]));
    core->add(pooled(prompt, Pooling::kMean, mean[i]));
  }
  run_all(*core);
  for (size_t i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    const auto prompt = prompt_of(std::vector<size_t>{30, 3, 1, 13}[i], static_cast<int32_t>(i));
    expect_pooled(last[i], state_behind(prompt));
    expect_pooled(mean[i], mean_state(prompt));
  }
  EXPECT_EQ(plain.tokens.size(), 9U);
  EXPECT_TRUE(plain.events.back().pooled.empty());
  EXPECT_EQ(core->stats().pages_used, 0);
}

TEST(Pooling, AMeanComputesWhatTheCacheHas) {
  const auto core = make_core(small_options(64));
  const std::vector<int32_t> prompt = prompt_of(18, 5);
  std::vector<Answer> answers(3);
  core->add(greedy(prompt, 1, answers[0]));
  run_all(*core);
  core->add(pooled(prompt, Pooling::kMean, answers[1]));
  core->add(pooled(prompt, Pooling::kLast, answers[2]));
  run_all(*core);
  EXPECT_EQ(answers[1].events.back().cached_tokens, 0);
  EXPECT_EQ(answers[2].events.back().cached_tokens, 16);
  expect_pooled(answers[1], mean_state(prompt));
  expect_pooled(answers[2], state_behind(prompt));
}

// What was added up before pages ran out is not added again.
TEST(Pooling, SurvivesPreemption) {
  int64_t preemptions = 0;
  for (int begun = 1; begun < 30; ++begun) {
    EngineOptions options = small_options(12);
    options.max_num_batched_tokens = 5;
    const auto core = make_core(options);
    std::vector<Answer> answers(3);
    Request longer = greedy(prompt_of(8, 1), 36, answers[0]);
    longer.ignore_eos = true;
    core->add(longer);
    for (int i = 0; i < begun; ++i) {
      core->step();
    }
    core->add(pooled(prompt_of(20, 3), Pooling::kMean, answers[1]));
    core->add(pooled(prompt_of(18, 4), Pooling::kLast, answers[2]));
    run_all(*core);
    preemptions += core->stats().preemptions;
    EXPECT_EQ(answers[0].tokens, alone(longer).tokens);
    expect_pooled(answers[1], mean_state(prompt_of(20, 3)));
    expect_pooled(answers[2], state_behind(prompt_of(18, 4)));
  }
  EXPECT_GT(preemptions, 0);
}

TEST(Pooling, BesideSequencesThatTheModelSamples) {
  auto model = std::make_unique<FakeModel>();
  model->set_sampling(true);
  const auto core = make_core(small_options(64), std::move(model));
  std::vector<Answer> answers(3);
  Request first = greedy(prompt_of(6, 1), 60, answers[0]);
  first.ignore_eos = true;
  core->add(first);
  for (int i = 0; i < 8; ++i) {
    core->step();
  }
  core->add(pooled(prompt_of(40, 3), Pooling::kMean, answers[1]));
  core->add(pooled(prompt_of(40, 4), Pooling::kLast, answers[2]));
  run_all(*core);
  EXPECT_EQ(answers[0].tokens, alone(first).tokens);
  expect_pooled(answers[1], mean_state(prompt_of(40, 3)));
  expect_pooled(answers[2], state_behind(prompt_of(40, 4)));
}

TEST(Pooling, EndsWithoutAVector) {
  const auto core = make_core(small_options(64));
  std::vector<Answer> answers(2);
  core->add(pooled({5, 6, FakeModel::kNanTrigger, 7, 8}, Pooling::kMean, answers[0]));
  Request cancelled = pooled(prompt_of(40, 3), Pooling::kMean, answers[1]);
  const auto flag = cancelled.cancelled;
  core->add(std::move(cancelled));
  core->step();
  *flag = true;
  run_all(*core);
  EXPECT_EQ(answers[0].finish, FinishReason::kError);
  EXPECT_NE(answers[0].error.find("NaN"), std::string::npos);
  EXPECT_EQ(answers[1].finish, FinishReason::kCancelled);
  EXPECT_TRUE(answers[1].events.back().pooled.empty());
  Request both = pooled({5, 6}, Pooling::kLast, answers[0]);
  both.max_tokens = 1;
  EXPECT_FALSE(EngineCore::check(both, core->options(), core->model_config()).ok());
}

}  // namespace
}  // namespace nibble
