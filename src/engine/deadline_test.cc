#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "engine/testing/core_runs.h"

namespace nibble {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

Request endless(std::vector<int32_t> prompt, Answer& answer) {
  Request request = greedy(std::move(prompt), 100, answer);
  request.ignore_eos = true;
  return request;
}

std::unique_ptr<EngineCore> core_of(bool samples, int64_t max_num_seqs) {
  auto model = std::make_unique<FakeModel>();
  model->set_sampling(samples);
  EngineOptions options = small_options(64);
  options.max_num_seqs = max_num_seqs;
  return make_core(options, std::move(model));
}

TEST(Deadline, EndsAnAnswerThatRuns) {
  for (const bool samples : {false, true}) {
    const auto core = core_of(samples, 5);
    Answer answer;
    Answer other;
    Request request = endless({5, 6, 7}, answer);
    request.deadline = Clock::now() + milliseconds(20);
    core->add(std::move(request));
    core->add(endless({5, 6, 8}, other));
    for (int i = 0; i < 3; ++i) {
      core->step();
    }
    std::this_thread::sleep_for(milliseconds(25));
    run_all(*core);
    EXPECT_EQ(answer.finish, FinishReason::kTimeout);
    EXPECT_TRUE(answer.error.empty());
    EXPECT_GE(answer.tokens.size(), 2U);
    EXPECT_LE(answer.tokens.size(), 5U);
    EXPECT_EQ(other.finish, FinishReason::kLength);
    EXPECT_EQ(other.tokens.size(), 100U);
    EXPECT_EQ(core->stats().pages_used, 0);
  }
}

// Steps that are started ahead do not keep those that wait from being told.
TEST(Deadline, RefusesARequestThatWaits) {
  for (const bool samples : {false, true}) {
    const auto core = core_of(samples, 1);
    Answer running;
    Answer waiting;
    core->add(endless({5, 6, 7}, running));
    core->step();
    Request request = endless({5, 6, 8}, waiting);
    request.deadline = Clock::now();
    core->add(std::move(request));
    for (int i = 0; i < 3; ++i) {
      core->step();
    }
    EXPECT_EQ(waiting.finish, FinishReason::kTimeout);
    EXPECT_NE(waiting.error.find("still waited for others"), std::string::npos) << waiting.error;
    EXPECT_EQ(running.finish, FinishReason::kNone);
    run_all(*core);
    EXPECT_EQ(running.tokens.size(), 100U);
    EXPECT_EQ(core->never_admitted().at(0), 0);
  }
}

TEST(Deadline, RefusesAPromptThatIsStillRead) {
  const auto core = core_of(false, 5);
  Answer answer;
  Request request = endless(std::vector<int32_t>(40, 9), answer);  // steps of 12 tokens
  request.deadline = Clock::now() + milliseconds(20);
  core->add(std::move(request));
  core->step();
  std::this_thread::sleep_for(milliseconds(25));
  run_all(*core);
  EXPECT_EQ(answer.finish, FinishReason::kTimeout);
  EXPECT_NE(answer.error.find("still being read"), std::string::npos) << answer.error;
  EXPECT_TRUE(answer.tokens.empty());
  EXPECT_EQ(core->stats().pages_used, 0);
}

// With the answers of the engine itself: a client's queue keeps no other waiting.
TEST(Fairness, OneKeysQueueDoesNotStarveAnother) {
  const auto core = core_of(false, 2);
  std::vector<Answer> many(100);
  for (size_t i = 0; i < many.size(); ++i) {
    Request request = greedy({5, static_cast<int32_t>(4 + i % 50), 8}, 6, many[i]);
    request.client = 1;
    core->add(std::move(request));
  }
  core->step();
  Answer late;
  Request request = greedy({9, 10}, 6, late);
  request.client = 2;
  core->add(std::move(request));
  while (late.finish == FinishReason::kNone) {
    ASSERT_TRUE(core->step());
  }
  const auto done = std::ranges::count_if(
      many, [](const Answer& answer) { return answer.finish != FinishReason::kNone; });
  EXPECT_LE(done, 4);
  run_all(*core);
  for (const Answer& answer : many) {
    EXPECT_NE(answer.finish, FinishReason::kNone);
  }
}

}  // namespace
}  // namespace nibble
