#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "engine/engine_core.h"
#include "engine/testing/core_runs.h"

namespace nibble {
namespace {

Request endless(std::vector<int32_t> prompt, int64_t max_tokens, Answer& answer) {
  Request request = greedy(std::move(prompt), max_tokens, answer);
  request.ignore_eos = true;
  return request;
}

/// The answer of a model that samples, as those on GPUs do, or does not.
std::vector<int32_t> answer_of(Request request, bool samples) {
  Answer answer;
  request.on_event = greedy({0}, 1, answer).on_event;
  auto model = std::make_unique<FakeModel>();
  model->set_sampling(samples);
  const auto core = make_core(small_options(64), std::move(model));
  core->add(std::move(request));
  run_all(*core);
  return answer.tokens;
}

TEST(BadWords, BanTheirLastTokenBehindTheOthers) {
  Answer unused;
  Request request = endless({9, 10, 11}, 30, unused);
  const std::vector<int32_t> plain = answer_of(request, false);
  request.bad_words = {{plain[0], plain[1]}, {plain[4]}, {plain[2], plain[3], 63, 62, 61}};
  const std::vector<int32_t> answer = answer_of(request, false);
  EXPECT_EQ(answer[0], plain[0]);  // alone it is no bad word
  EXPECT_NE(answer[1], plain[1]);
  EXPECT_EQ(std::ranges::count(answer, plain[4]), 0);
  for (size_t i = 1; i < answer.size(); ++i) {
    EXPECT_FALSE(answer[i - 1] == plain[0] && answer[i] == plain[1]);
  }
  EXPECT_EQ(answer_of(request, true), answer);
  // Only what the answer says counts: the word may begin in the prompt.
  request.bad_words = {{request.prompt.back(), plain[0]}};
  EXPECT_EQ(answer_of(request, false), plain);
}

TEST(BadWords, OfNoTokensOrUnknownOnesAreRefused) {
  const FakeModel model;
  const auto options = EngineCore::resolve(small_options(4), model.config());
  Answer unused;
  Request request = endless({5}, 1, unused);
  for (const std::vector<int32_t>& word : {std::vector<int32_t>{}, {64}, {3, -1}}) {
    request.bad_words = {word};
    EXPECT_EQ(EngineCore::check(request, *options, model.config()).code(),
              StatusCode::kInvalidArgument);
  }
  request.bad_words = {};
  request.sampling.allowed_tokens = {64};
  EXPECT_FALSE(EngineCore::check(request, *options, model.config()).ok());
}

TEST(AllowedTokens, AreTheOnlyOnes) {
  Answer unused;
  Request request = endless({9, 10, 11}, 40, unused);
  const std::vector<int32_t> allowed = {7, 21, 40, 41};
  request.sampling.allowed_tokens = allowed;
  for (const double temperature : {0.0, 1.5}) {
    request.sampling.temperature = temperature;
    request.sampling.seed = 5;
    const std::vector<int32_t> answer = answer_of(request, false);
    ASSERT_EQ(answer.size(), 40U);
    for (const int32_t token : answer) {
      EXPECT_EQ(std::ranges::count(allowed, token), 1);
    }
    EXPECT_EQ(answer_of(request, true), answer);
    // The same as a bias against all others.
    Request biased = request;
    biased.sampling.allowed_tokens = {};
    for (int32_t token = 0; token < 64; ++token) {
      if (std::ranges::count(allowed, token) == 0) {
        biased.sampling.logit_bias.emplace_back(token, -1000.0F);
      }
    }
    EXPECT_EQ(answer_of(biased, false), answer);
  }
  request.min_tokens = 3;  // bans what is allowed
  request.stop_tokens = allowed;
  Answer failed;
  request.on_event = greedy({0}, 1, failed).on_event;
  const auto core = make_core(small_options(64));
  core->add(request);
  run_all(*core);
  EXPECT_EQ(failed.finish, FinishReason::kError);
}

TEST(Priority, TheLowestIsTakenFirstAndOthersInTheirOrder) {
  EngineOptions options = small_options(64);
  options.max_num_seqs = 1;
  const auto core = make_core(options);
  std::vector<std::string> ended;
  Answer unused;
  const auto add = [&](const std::string& name, int64_t priority) {
    Request request = endless({5, 6, 7}, 5, unused);
    request.priority = priority;
    request.on_event = [&ended, name](const TokenEvent& event) {
      if (event.finish != FinishReason::kNone) {
        ended.push_back(name);
      }
    };
    core->add(std::move(request));
  };
  add("first", 100);
  core->step();
  for (const auto& [name, priority] :
       {std::pair("late", 3), {"plain 1", 0}, {"urgent 1", -5}, {"plain 2", 0}, {"urgent 2", -5}}) {
    add(name, priority);
  }
  run_all(*core);
  EXPECT_EQ(ended, (std::vector<std::string>{"first", "urgent 1", "urgent 2", "plain 1", "plain 2",
                                             "late"}));
}

TEST(CacheSalt, OnlyEqualOnesSharePages) {
  const auto core = make_core(small_options(64));
  const std::vector<int32_t> prompt(17, 9);
  const auto cached = [&](const std::string& salt) {
    Answer answer;
    Request request = endless(prompt, 5, answer);
    request.cache_salt = salt;
    core->add(request);
    run_all(*core);
    EXPECT_EQ(answer.tokens, alone(request).tokens);
    return answer.events.back().cached_tokens;
  };
  EXPECT_EQ(cached("a"), 0);
  EXPECT_EQ(cached("b"), 0);
  EXPECT_EQ(cached("a\t"), 0);  // the byte is a token of the prompt, too
  EXPECT_EQ(cached(""), 0);
  for (const char* salt : {"a", "b", "a\t", ""}) {
    EXPECT_EQ(cached(salt), 16) << salt;
  }
}

}  // namespace
}  // namespace nibble
