#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "engine/engine_core.h"
#include "engine/testing/core_runs.h"

namespace nibble {
namespace {

constexpr int kTop = 3;

Request scored(std::vector<int32_t> prompt, int64_t max_tokens, Answer& answer) {
  Request request = greedy(std::move(prompt), max_tokens, answer);
  request.ignore_eos = true;
  request.prompt_logprobs = kTop;
  return request;
}

// The oracle: every prompt token is generated behind the tokens before it, because a bias wants it
// so; its log-probability is that of the untouched logits.
std::vector<ScoredToken> generated_scores(const std::vector<int32_t>& prompt) {
  std::vector<ScoredToken> out;
  for (size_t i = 1; i < prompt.size(); ++i) {
    const auto end = prompt.begin() + static_cast<std::ptrdiff_t>(i);
    Answer answer;
    Request request = greedy({prompt.begin(), end}, 1, answer);
    request.sampling.logit_bias = {{prompt[i], 1000.0F}};
    request.top_logprobs = 20;
    const TokenEvent event = alone(request).events.at(0);
    EXPECT_EQ(event.token, prompt[i]);
    const auto& top = event.top_logprobs;
    const auto place = std::ranges::find(top, prompt[i], &TokenLogprob::token) - top.begin();
    out.push_back({.token = prompt[i],
                   .rank = static_cast<int32_t>(place) + 1,
                   .logprob = event.logprob,
                   .top_logprobs = {top.begin(), top.begin() + kTop}});
  }
  return out;
}

void expect_scores(const Answer& answer, const std::vector<int32_t>& prompt) {
  const std::vector<ScoredToken> expected = generated_scores(prompt);
  ASSERT_EQ(answer.prompt_logprobs.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) {
    const ScoredToken& got = answer.prompt_logprobs[i];
    EXPECT_EQ(got.token, expected[i].token);
    EXPECT_EQ(got.logprob, expected[i].logprob) << i;
    EXPECT_EQ(got.top_logprobs, expected[i].top_logprobs);
    if (expected[i].rank <= 20) {
      EXPECT_EQ(got.rank, expected[i].rank);
    } else {
      EXPECT_GT(got.rank, 20);
    }
  }
}

// Prompts in one step, cut by the tokens of a step, and cut by its rows.
TEST(PromptLogprobs, EqualThoseOfGeneratedTokens) {
  for (const int64_t rows : {1, 3, 5, 100}) {
    EngineOptions options = small_options(64);
    options.max_prompt_rows = rows;
    const auto core = make_core(options);
    std::vector<Answer> answers(4);
    const std::vector<std::vector<int32_t>> prompts = {prompt_of(30, 1), prompt_of(5, 2),
                                                       prompt_of(1, 3), prompt_of(13, 4)};
    Answer plain;
    core->add(greedy(prompt_of(20, 7), 9, plain));
    for (size_t i = 0; i < prompts.size(); ++i) {
      core->add(scored(prompts[i], static_cast<int64_t>(i), answers[i]));
    }
    run_all(*core);
    for (size_t i = 0; i < prompts.size(); ++i) {
      SCOPED_TRACE(i);
      expect_scores(answers[i], prompts[i]);
      EXPECT_EQ(answers[i].tokens.size(), i);
      EXPECT_EQ(answers[i].finish, FinishReason::kLength);
    }
    EXPECT_EQ(plain.tokens.size(), 9U);
  }
}

TEST(PromptLogprobs, ComputesWhatOthersHaveCachedAndOffersItsOwn) {
  const auto core = make_core(small_options(64));
  const std::vector<int32_t> prompt = prompt_of(18, 5);
  std::vector<Answer> answers(4);
  core->add(greedy(prompt, 1, answers[0]));
  run_all(*core);
  core->add(scored(prompt, 1, answers[1]));
  run_all(*core);
  EXPECT_EQ(answers[1].events.back().cached_tokens, 0);
  expect_scores(answers[1], prompt);
  const std::vector<int32_t> other = prompt_of(18, 6);
  core->add(scored(other, 1, answers[2]));
  run_all(*core);
  core->add(greedy(other, 1, answers[3]));
  run_all(*core);
  EXPECT_EQ(answers[3].events.back().cached_tokens, 16);
}

TEST(PromptLogprobs, WithoutAnAnswerThePromptIsCachedAllTheSame) {
  const auto core = make_core(small_options(64));
  const std::vector<int32_t> prompt = prompt_of(18, 5);
  Answer none;
  core->add(greedy(prompt, 0, none));
  run_all(*core);
  EXPECT_EQ(none.finish, FinishReason::kLength);
  EXPECT_EQ(none.events.size(), 1U);
  EXPECT_TRUE(none.tokens.empty());
  EXPECT_EQ(core->stats().generated_tokens, 0);
  Answer next;
  core->add(greedy(prompt, 2, next));
  run_all(*core);
  EXPECT_EQ(next.events.back().cached_tokens, 16);
}

TEST(PromptLogprobs, NanInsideAPromptFailsTheRequest) {
  const auto core = make_core(small_options(64));
  Answer answer;
  core->add(scored({5, 6, FakeModel::kNanTrigger, 7, 8}, 4, answer));
  run_all(*core);
  EXPECT_EQ(answer.finish, FinishReason::kError);
  EXPECT_NE(answer.error.find("NaN"), std::string::npos);
}

// Where the model samples, steps with rows of prompts are sampled on the host, and others run ahead
// as ever.
TEST(PromptLogprobs, BesideSequencesThatTheModelSamples) {
  EngineOptions options = small_options(64);
  options.max_prompt_rows = 4;
  auto model = std::make_unique<FakeModel>();
  model->set_sampling(true);
  const FakeModel& watched = *model;
  const auto core = make_core(options, std::move(model));
  std::vector<Answer> answers(3);
  Request first = greedy(prompt_of(6, 1), 60, answers[0]);
  Request second = greedy(prompt_of(6, 2), 40, answers[1]);
  first.ignore_eos = second.ignore_eos = true;
  second.sampling.temperature = 0.9;
  second.sampling.seed = 11;
  core->add(first);
  core->add(second);
  for (int i = 0; i < 8; ++i) {
    core->step();
  }
  const std::vector<int32_t> prompt = prompt_of(40, 3);
  core->add(scored(prompt, 5, answers[2]));
  run_all(*core);
  expect_scores(answers[2], prompt);
  EXPECT_EQ(answers[0].tokens, alone(first).tokens);
  EXPECT_EQ(answers[1].tokens, alone(second).tokens);
  EXPECT_GT(watched.fed_steps(), 20);
}

// Pages run out while a prompt is scored: what was scored is not scored again, and nothing is lost.
TEST(PromptLogprobs, SurvivePreemption) {
  EngineOptions options = small_options(12);
  options.max_prompt_rows = 3;
  const auto core = make_core(options);
  std::vector<Answer> answers(3);
  Request longer = greedy(prompt_of(8, 1), 36, answers[0]);
  longer.ignore_eos = true;
  core->add(longer);
  const std::vector<int32_t> prompt = prompt_of(20, 3);
  core->add(scored(prompt, 20, answers[1]));
  core->add(scored(prompt_of(20, 4), 20, answers[2]));
  run_all(*core);
  EXPECT_GT(core->stats().preemptions, 0);
  expect_scores(answers[1], prompt);
  expect_scores(answers[2], prompt_of(20, 4));
  EXPECT_EQ(answers[0].tokens, alone(longer).tokens);
}

}  // namespace
}  // namespace nibble
