#include "engine/engine_core.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "engine/testing/core_runs.h"

namespace nibble {
namespace {

TEST(EngineCore, ResolvesDefaultsAndRefusesNonsense) {
  const FakeModel model;
  EngineOptions options = small_options(0);
  auto resolved = EngineCore::resolve(options, model.config());
  ASSERT_TRUE(resolved.ok());
  EXPECT_EQ(resolved->max_model_len, 256);
  EXPECT_EQ(resolved->num_pages, 5 * 64);
  options.num_pages = 3;
  EXPECT_EQ(EngineCore::resolve(options, model.config())->max_model_len, 12);
  options.max_model_len = 257;
  EXPECT_EQ(EngineCore::resolve(options, model.config()).status().code(),
            StatusCode::kInvalidArgument);
  options = small_options(0);
  options.kv_bytes = 1;
  EXPECT_FALSE(EngineCore::resolve(options, model.config()).ok());
  options = small_options(0);
  options.max_num_seqs = -1;
  EXPECT_FALSE(EngineCore::resolve(options, model.config()).ok());
}

TEST(EngineCore, RefusesRequestsThatCannotBeServed) {
  const FakeModel model;
  const auto options = EngineCore::resolve(small_options(4), model.config());
  Answer answer;
  const auto code = [&](const Request& request) {
    return EngineCore::check(request, *options, model.config()).code();
  };
  EXPECT_EQ(code(greedy({5}, 1, answer)), StatusCode::kOk);
  EXPECT_EQ(code(greedy({}, 1, answer)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(greedy({64}, 1, answer)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(greedy({-1}, 1, answer)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(greedy({5}, -1, answer)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(greedy({5}, 0, answer)), StatusCode::kOk);
  EXPECT_EQ(code(greedy(std::vector<int32_t>(16, 5), 0, answer)), StatusCode::kOk);
  EXPECT_EQ(code(greedy(std::vector<int32_t>(17, 5), 0, answer)), StatusCode::kInvalidArgument);
  Request scored = greedy({5}, 1, answer);
  scored.prompt_logprobs = 21;
  EXPECT_EQ(code(scored), StatusCode::kInvalidArgument);
  EXPECT_EQ(code(greedy(std::vector<int32_t>(15, 5), 1, answer)), StatusCode::kOk);
  EXPECT_EQ(code(greedy(std::vector<int32_t>(16, 5), 1, answer)), StatusCode::kInvalidArgument);
}

TEST(EngineCore, StopsAtLengthLimits) {
  const auto core = make_core(small_options(4));
  Answer by_request;
  Answer by_model;
  Request a = greedy({5, 6}, 3, by_request);
  Request b = greedy({7, 8}, 1000, by_model);
  a.ignore_eos = b.ignore_eos = true;
  core->add(std::move(a));
  core->add(std::move(b));
  run_all(*core);
  EXPECT_EQ(by_request.finish, FinishReason::kLength);
  EXPECT_EQ(by_request.tokens.size(), 3U);
  EXPECT_EQ(by_model.finish, FinishReason::kLength);
  EXPECT_EQ(by_model.tokens.size(), 14U);  // 16 positions, prompt of 2
  EXPECT_EQ(core->stats().pages_used, 0);
}

TEST(EngineCore, StopTokensMinTokensAndEndTokens) {
  Answer free_run;
  Request request = greedy({9, 10, 11}, 20, free_run);
  request.ignore_eos = true;
  const auto core = make_core(small_options(64));
  core->add(request);
  run_all(*core);
  ASSERT_EQ(free_run.tokens.size(), 20U);
  const int32_t stop = free_run.tokens[6];
  const auto first = std::ranges::find(free_run.tokens, stop) - free_run.tokens.begin();

  Answer stopped;
  request.on_event = greedy({0}, 1, stopped).on_event;
  request.stop_tokens = {stop};
  core->add(request);
  run_all(*core);
  EXPECT_EQ(stopped.finish, FinishReason::kStop);
  EXPECT_EQ(std::ssize(stopped.tokens), first + 1);
  EXPECT_EQ(stopped.tokens.back(), stop);

  Answer held;
  request.on_event = greedy({0}, 1, held).on_event;
  request.min_tokens = first + 3;
  core->add(request);
  run_all(*core);
  EXPECT_GE(std::ssize(held.tokens), first + 3);
}

TEST(EngineCore, SharesPagesOfEqualPrompts) {
  const auto core = make_core(small_options(64));
  std::vector<int32_t> prompt(17);
  for (size_t i = 0; i < prompt.size(); ++i) {
    prompt[i] = static_cast<int32_t>(5 + i);
  }
  Answer first;
  core->add(greedy(prompt, 8, first));
  run_all(*core);
  EXPECT_EQ(first.events.back().cached_tokens, 0);
  Answer second;
  core->add(greedy(prompt, 8, second));
  run_all(*core);
  EXPECT_EQ(second.events.back().cached_tokens, 16);
  EXPECT_EQ(second.tokens, first.tokens);
  // A full last page is still computed, since its logits are wanted.
  prompt.resize(16);
  Answer third;
  core->add(greedy(prompt, 8, third));
  run_all(*core);
  EXPECT_EQ(third.events.back().cached_tokens, 12);
  EXPECT_EQ(core->stats().cached_tokens, 28);
  EXPECT_EQ(core->stats().prompt_tokens, 17 + 17 + 16);
}

// Keys of prompts beyond the original length depend on the prompt's length.
TEST(EngineCore, DynamicRopeSharesNoPagesOfLongPrompts) {
  auto model = std::make_unique<FakeModel>();
  model->set_dynamic_rope(20);
  const auto core = make_core(small_options(64), std::move(model));
  const auto cached_of = [&](size_t length, int64_t max_tokens) {
    std::vector<int32_t> prompt(length);
    std::iota(prompt.begin(), prompt.end(), 5);
    Answer answer;
    Request request = greedy(std::move(prompt), max_tokens, answer);
    request.ignore_eos = true;
    const Answer expected = alone(request);
    core->add(std::move(request));
    run_all(*core);
    EXPECT_EQ(answer.tokens, expected.tokens);
    return answer.events.back().cached_tokens;
  };
  EXPECT_EQ(cached_of(20, 30), 0);  // grows to 50 tokens
  EXPECT_EQ(cached_of(20, 30), 16);
  EXPECT_EQ(cached_of(21, 8), 0);  // begins as they do
  EXPECT_EQ(cached_of(21, 8), 0);
  EXPECT_EQ(cached_of(40, 8), 0);
  EXPECT_EQ(cached_of(18, 8), 16);
}

TEST(EngineCore, NanFailsItsRequestAlone) {
  const auto core = make_core(small_options(64));
  Answer good;
  Answer bad;
  Request request = greedy({5, 6, 7, 8, 9}, 10, good);
  request.ignore_eos = true;
  core->add(request);
  core->add(greedy({5, 6, 7, 8, FakeModel::kNanTrigger}, 10, bad));
  run_all(*core);
  EXPECT_EQ(bad.finish, FinishReason::kError);
  EXPECT_NE(bad.error.find("NaN"), std::string::npos);
  EXPECT_TRUE(bad.tokens.empty());
  EXPECT_EQ(good.finish, FinishReason::kLength);
  EXPECT_EQ(good.tokens, alone(request).tokens);
}

TEST(EngineCore, AbandonAnswersEverybodyAndStartsAfresh) {
  EngineOptions options = small_options(64);
  options.max_num_seqs = 2;
  const auto core = make_core(options);
  std::vector<Answer> answers(3);
  core->add(greedy({5, 6}, 10, answers[0]));
  core->add(greedy({5, FakeModel::kErrorTrigger}, 10, answers[1]));
  core->add(greedy({5, 7}, 10, answers[2]));
  EXPECT_THROW(core->step(), InternalError);
  core->abandon("batch", "other");
  EXPECT_EQ(answers[0].error, "batch");
  EXPECT_EQ(answers[1].error, "batch");
  EXPECT_EQ(answers[2].error, "other");
  EXPECT_TRUE(core->idle());
  core->check_integrity();
  EXPECT_EQ(core->stats().pages_used, 0);
}

TEST(EngineCore, CancelFreesPagesWithinOneStep) {
  EngineOptions options = small_options(16);
  options.max_num_seqs = 2;
  const auto core = make_core(options);
  std::vector<Answer> answers(3);
  std::vector<Request> requests = {greedy(std::vector<int32_t>(3, 5), 50, answers[0]),
                                   greedy(std::vector<int32_t>(40, 6), 50, answers[1]),
                                   greedy(std::vector<int32_t>(3, 7), 50, answers[2])};
  for (const Request& request : requests) {
    core->add(request);
  }
  core->step();  // the first decodes, the second is in its prompt, the third waits
  EXPECT_EQ(core->stats().running, 2);
  EXPECT_EQ(core->stats().waiting, 1);
  for (const Request& request : requests) {
    request.cancelled->store(true);
  }
  EXPECT_FALSE(core->step());
  for (const Answer& answer : answers) {
    EXPECT_EQ(answer.finish, FinishReason::kCancelled);
  }
  EXPECT_EQ(core->stats().pages_used, 0);
  EXPECT_EQ(core->never_admitted().at(0), 0);
  core->check_integrity();
}

TEST(EngineCore, SeededSamplingDoesNotDependOnTheBatch) {
  Answer alone_answer;
  Request request = greedy({20, 21, 22}, 30, alone_answer);
  request.sampling.temperature = 1.0;
  request.sampling.seed = 7;
  request.sampling.repetition_penalty = 1.1;
  request.sampling.presence_penalty = 0.3;
  request.sampling.top_p = 0.9;
  request.ignore_eos = true;
  const Answer expected = alone(request);
  const auto core = make_core(small_options(20));
  std::vector<Answer> others(8);
  for (size_t i = 0; i < others.size(); ++i) {
    if (i == 3) {
      core->add(request);
    }
    core->add(greedy(std::vector<int32_t>(i + 3, static_cast<int32_t>(30 + i)), 40, others[i]));
  }
  run_all(*core);
  EXPECT_EQ(alone_answer.tokens, expected.tokens);
  EXPECT_EQ(expected.tokens.size(), 30U);
  request.sampling.seed = 8;
  EXPECT_NE(alone(request).tokens, expected.tokens);
}

std::unique_ptr<FakeModel> sampling_model() {
  auto model = std::make_unique<FakeModel>();
  model->set_sampling(true);
  return model;
}

TEST(EngineCore, StartsStepsBeforeTokensAreKnown) {
  auto model = sampling_model();
  const FakeModel& watched = *model;
  const auto core = make_core(small_options(64), std::move(model));
  std::vector<Answer> answers(3);
  Request request = greedy({5, 6, 7}, 12, answers[0]);
  request.ignore_eos = true;
  core->add(request);
  for (size_t i = 1; i <= 12; ++i) {
    EXPECT_TRUE(core->step());
    EXPECT_EQ(answers[0].tokens.size(), i) << "one token a step";
  }
  EXPECT_EQ(watched.fed_steps(), 10);  // all but the prompt's and the one after it
  EXPECT_EQ(answers[0].tokens, alone(request).tokens);
  EXPECT_FALSE(core->step());

  // One that ends while the next step is under way, and one that comes then.
  request.on_event = greedy({0}, 1, answers[1]).on_event;
  request.stop_tokens = {answers[0].tokens[5]};
  core->add(request);
  while (answers[1].finish == FinishReason::kNone) {
    EXPECT_TRUE(core->step());
    core->check_integrity();
  }
  EXPECT_EQ(answers[1].finish, FinishReason::kStop);
  EXPECT_EQ(core->stats().pages_used, 0);
  core->add(greedy({9, 8}, 5, answers[2]));
  run_all(*core);
  EXPECT_EQ(answers[2].tokens, alone(greedy({9, 8}, 5, answers[1])).tokens);

  // One that is cancelled then.
  Answer cancelled;
  request = greedy({5, 6, 7}, 100, cancelled);
  request.ignore_eos = true;
  core->add(request);
  core->step();
  core->step();
  core->cancel_all();
  EXPECT_EQ(cancelled.finish, FinishReason::kCancelled);
  EXPECT_TRUE(core->idle());
  EXPECT_TRUE(core->step()) << "ends what was under way";
  EXPECT_FALSE(core->step());
  EXPECT_EQ(core->stats().pages_used, 0);
}

// By steps as long as a step may be and the pages of every pool hold; nothing is left of them.
TEST(EngineCore, WarmsUpBeforeTheFirstRequest) {
  EngineOptions options = small_options(20);
  options.max_num_batched_tokens = 100;
  for (const auto& [warm_up, proposed] : {std::pair(false, 0), {true, 0}, {true, 4}}) {
    auto model = sampling_model();
    model->set_windows({0, 8});
    const FakeModel& watched = *model;
    options.warm_up = warm_up;
    options.speculation.tokens = proposed;
    const auto core = make_core(options, std::move(model));
    EXPECT_EQ(watched.largest_batch(), warm_up ? 64 : 0);
    EXPECT_EQ(watched.steps() > 0, warm_up);
    const int64_t before = watched.steps();
    EXPECT_EQ(watched.warm_up_steps(), before);
    EXPECT_EQ(core->stats().pages_used, 0);
    EXPECT_EQ(core->stats().steps, 0);
    EXPECT_TRUE(core->idle());
    Answer answer;
    const Request request = greedy(std::vector<int32_t>(30, 0), 12, answer);
    core->add(request);
    run_all(*core);
    EXPECT_EQ(watched.warm_up_steps(), before);
    EXPECT_GT(watched.steps(), before);
    EXPECT_EQ(core->stats().cached_tokens, 0);
    EXPECT_EQ(answer.tokens, alone(request, {0, 8}).tokens);
  }
}

TEST(EngineCore, PenaltiesAreNotSampledAhead) {
  auto model = sampling_model();
  const FakeModel& watched = *model;
  const auto core = make_core(small_options(64), std::move(model));
  Answer answer;
  Request request = greedy({5, 6, 7}, 12, answer);
  request.ignore_eos = true;
  request.sampling.frequency_penalty = 0.5;
  core->add(request);
  run_all(*core);
  EXPECT_EQ(watched.fed_steps(), 0);
  EXPECT_EQ(answer.tokens, alone(request).tokens);
}

TEST(EngineCore, DecodesAreNeverHeldUpByPrefill) {
  const auto core = make_core(small_options(64));
  Answer decoding;
  Answer prefilling;
  Request request = greedy({5, 6}, 40, decoding);
  request.ignore_eos = true;
  core->add(std::move(request));
  core->step();
  core->add(greedy(std::vector<int32_t>(100, 7), 4, prefilling));
  for (size_t i = 2; i <= 9; ++i) {
    core->step();
    EXPECT_EQ(decoding.tokens.size(), i);
    EXPECT_TRUE(prefilling.tokens.empty());
  }
  core->step();  // nine chunks of 11 and one token
  EXPECT_TRUE(prefilling.tokens.empty());
  core->step();
  EXPECT_EQ(prefilling.tokens.size(), 1U);
}

/// Allows the tokens of a sequence, one after another, then the end.
class OneSequence final : public TokenConstraint {
 public:
  explicit OneSequence(std::vector<int32_t> tokens, size_t free = 0)
      : tokens_(std::move(tokens)), free_(free) {}

  bool fill(std::span<uint32_t> mask) override {
    if (taken_ < free_) {
      return false;
    }
    std::ranges::fill(mask, 0U);
    const size_t at = taken_ - free_;
    const int32_t next = at < tokens_.size() ? tokens_[at] : FakeModel::kEos;
    mask[static_cast<size_t>(next / 32)] |= 1U << (next % 32);
    return true;
  }
  Status accept(int32_t token) override {
    const size_t at = taken_++;
    const bool wrong = at >= free_ && at - free_ < tokens_.size() && token != tokens_[at - free_];
    return wrong ? Status(StatusCode::kInvalidArgument, "a token that may not come") : Status();
  }

 private:
  std::vector<int32_t> tokens_;
  size_t free_;  // tokens before it holds
  size_t taken_ = 0;
};

TEST(EngineCore, ConstraintsHoldWhereverTokensAreSampled) {
  for (const bool samples : {false, true}) {
    auto model = std::make_unique<FakeModel>();
    model->set_sampling(samples);
    EngineOptions options = small_options(64);
    options.speculation = {.tokens = 4, .lookup_max = 2, .lookup_min = 1};
    const auto core = make_core(options, std::move(model));
    std::vector<Answer> answers(4);
    std::vector<Request> requests;
    for (size_t i = 0; i < answers.size(); ++i) {
      requests.push_back(greedy({5, 6, static_cast<int32_t>(7 + i)}, 12, answers[i]));
      requests.back().sampling.temperature = 2;
      requests.back().sampling.seed = i;
    }
    requests[0].constraint =
        std::make_shared<OneSequence>(std::vector<int32_t>{40, 41, 40, 41, 8, 40});
    requests[1].constraint = std::make_shared<OneSequence>(std::vector<int32_t>{9}, 3);
    const Answer alone_free = alone(requests[2]);
    for (Request& request : requests) {
      core->add(std::move(request));
    }
    run_all(*core);
    EXPECT_EQ(answers[0].tokens, (std::vector<int32_t>{40, 41, 40, 41, 8, 40, FakeModel::kEos}));
    EXPECT_EQ(answers[0].finish, FinishReason::kStop);
    if (answers[1].tokens.size() > 3) {
      EXPECT_EQ(answers[1].tokens[3], 9);
    }
    EXPECT_EQ(answers[2].tokens, alone_free.tokens);
  }
}

// Steps with masks are started ahead as others are; only their sampling waits.
TEST(EngineCore, StepsWithMasksAreStartedAhead) {
  auto model = sampling_model();
  const FakeModel& watched = *model;
  const auto core = make_core(small_options(64), std::move(model));
  Answer bound;
  Answer free;
  std::vector<int32_t> tokens(11);
  std::iota(tokens.begin(), tokens.end(), 20);
  Request constrained = greedy({5, 6, 7}, 12, bound);
  constrained.constraint = std::make_shared<OneSequence>(tokens);
  Request other = greedy({9, 8, 7}, 12, free);
  other.ignore_eos = true;
  const Answer expected = alone(other);
  core->add(std::move(constrained));
  core->add(std::move(other));
  run_all(*core);
  tokens.push_back(FakeModel::kEos);
  EXPECT_EQ(bound.tokens, tokens);
  EXPECT_EQ(free.tokens, expected.tokens);
  EXPECT_EQ(watched.fed_steps(), 10);
}

/// Its first masks take long.
class SlowSequence final : public TokenConstraint {
 public:
  bool fill(std::span<uint32_t> mask) override {
    if (masks_++ < 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    return tokens_.fill(mask);
  }
  Status accept(int32_t token) override { return tokens_.accept(token); }

 private:
  OneSequence tokens_{{30, 31, 32, 33}};
  int masks_ = 0;
};

// A mask that takes long holds up nobody else, and its own sequence loses nothing but the time.
TEST(EngineCore, OthersGoOnWhileAMaskIsMade) {
  for (const bool samples : {false, true}) {
    auto model = std::make_unique<FakeModel>();
    model->set_sampling(samples);
    const auto core = make_core(small_options(64), std::move(model));
    Answer slow;
    Answer free;
    Answer cut;
    Request constrained = greedy({5, 6, 7, 8, 9, 10}, 12, slow);
    constrained.constraint = std::make_shared<SlowSequence>();
    Request other = greedy({9, 8, 7}, 12, free);
    other.ignore_eos = true;
    Request cancelled = greedy({9, 8, 7, 6}, 12, cut);
    cancelled.constraint = std::make_shared<SlowSequence>();
    const Answer expected = alone(other);
    const auto ended = cancelled.cancelled;
    core->add(std::move(constrained));
    core->add(std::move(cancelled));
    core->add(std::move(other));
    const auto start = std::chrono::steady_clock::now();
    while (free.finish == FinishReason::kNone && core->step()) {
      core->check_integrity();
      ended->store(true);  // amid its mask
    }
    // Twelve tokens beside masks that take 400 ms.
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(390));
    EXPECT_TRUE(slow.tokens.empty());
    run_all(*core);
    EXPECT_EQ(slow.tokens, (std::vector<int32_t>{30, 31, 32, 33, FakeModel::kEos}));
    EXPECT_EQ(free.tokens, expected.tokens);
    EXPECT_EQ(cut.finish, FinishReason::kCancelled);
    EXPECT_EQ(core->stats().pages_used, 0);
  }
}

}  // namespace
}  // namespace nibble
