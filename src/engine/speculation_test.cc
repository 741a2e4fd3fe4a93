#include "engine/speculation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "engine/engine_core.h"
#include "engine/testing/core_runs.h"

namespace nibble {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Ids = std::vector<int32_t>;

TEST(Lookup, ProposesWhatFollowedTheLongestLatestOccurrence) {
  const Speculation options{.tokens = 8, .lookup_max = 3, .lookup_min = 2};
  const auto propose = [&](const Ids& tokens, int64_t most) {
    return look_up(tokens, options, most);
  };
  EXPECT_THAT(propose({1, 2, 3, 4, 5, 6, 1, 2, 3}, 2), ElementsAre(4, 5));
  // Three tokens are better than two that are later.
  EXPECT_THAT(propose({1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3}, 1), ElementsAre(4));
  // Of equals the latest.
  EXPECT_THAT(propose({2, 3, 4, 9, 2, 3, 5, 1, 2, 3}, 1), ElementsAre(5));
  EXPECT_THAT(propose({9, 3, 4, 1, 3}, 2), IsEmpty());  // one token is too few
  EXPECT_THAT(propose({1, 2, 3}, 2), IsEmpty());
  EXPECT_THAT(propose({}, 2), IsEmpty());
  EXPECT_THAT(propose({1}, 2), IsEmpty());
  // What repeats itself goes on.
  EXPECT_THAT(propose({5, 7, 8, 7, 8, 7, 8}, 5), ElementsAre(7, 8, 7, 8, 7));
  EXPECT_THAT(propose({1, 2, 3, 1, 2}, 0), IsEmpty());
}

TEST(DraftLength, FallsAndPausesWhereProposalsAreWrong) {
  const Speculation options{.tokens = 8};
  DraftLength length;
  EXPECT_EQ(length.next(options), 4);
  length.learn(options, 4, 4);
  EXPECT_EQ(length.next(options), 8);
  length.learn(options, 8, 3);
  EXPECT_EQ(length.next(options), 4);
  length.learn(options, 4, 4);
  EXPECT_EQ(length.next(options), 8);
  int64_t proposals = 0;
  for (int token = 0; token < 2000; ++token) {
    if (const int64_t proposed = length.next(options); proposed > 0) {
      ++proposals;
      length.learn(options, proposed, 0);
    }
  }
  EXPECT_LT(proposals, 25);
  int64_t longest = 0;
  for (int token = 0; token < 200; ++token) {
    const int64_t proposed = length.next(options);
    longest = std::max(longest, proposed);
    if (proposed > 0) {
      length.learn(options, proposed, proposed);
    }
  }
  EXPECT_EQ(longest, 8);
}

TEST(SpeculativeConfig, IsReadByVllmsNames) {
  const auto read = [](const char* json) { return parse_speculation(json); };
  const auto full = read(R"({"method":"ngram","num_speculative_tokens":6,"prompt_lookup_max":4,
                             "prompt_lookup_min":2})");
  ASSERT_TRUE(full.ok());
  EXPECT_EQ(full->tokens, 6);
  EXPECT_EQ(full->lookup_max, 4);
  EXPECT_EQ(full->lookup_min, 2);
  const auto short_form = read(R"({"method":"ngram","num_speculative_tokens":6})");
  EXPECT_EQ(short_form->lookup_max, 5);
  EXPECT_EQ(short_form->lookup_min, 5);
  const auto model = read(R"({"method":"draft_model","num_speculative_tokens":3,"model":"a/b"})");
  EXPECT_EQ(model->draft_model, "a/b");
  EXPECT_EQ(model->tokens, 3);
  EXPECT_EQ(full->draft_model, "");
  EXPECT_EQ(
      read(R"({"method":"ngram","num_speculative_tokens":6,"prompt_lookup_max":3})")->lookup_min,
      3);
  EXPECT_EQ(
      read(R"({"method":"ngram","num_speculative_tokens":6,"prompt_lookup_min":7})")->lookup_max,
      7);
  for (const auto& [json, word] :
       {std::pair{"", "JSON object"},
        {"[]", "JSON object"},
        {"{}", "needs method"},
        {R"({"method":"ngram"})", "num_speculative_tokens"},
        {R"({"method":"eagle","num_speculative_tokens":6})", "only the methods"},
        {R"({"method":7,"num_speculative_tokens":6})", "only the methods"},
        {R"({"method":"draft_model","num_speculative_tokens":6})", "needs model"},
        {R"({"method":"draft_model","num_speculative_tokens":6,"model":""})", "needs model"},
        {R"({"method":"draft_model","num_speculative_tokens":6,"model":"x","prompt_lookup_max":2})",
         "unknown member prompt_lookup_max"},
        {R"({"method":"ngram","num_speculative_tokens":0})", "num_speculative_tokens"},
        {R"({"method":"ngram","num_speculative_tokens":"6"})", "num_speculative_tokens"},
        {R"({"method":"ngram","num_speculative_tokens":6,"model":"x"})", "unknown member model"},
        {R"({"method":"ngram","num_speculative_tokens":6,"prompt_lookup_max":2,
            "prompt_lookup_min":3})",
         "must not be above"}}) {
    const auto parsed = read(json);
    ASSERT_FALSE(parsed.ok()) << json;
    EXPECT_THAT(parsed.status().message(), HasSubstr(word));
  }
}

TEST(Speculation, TakesFewerStepsForTheSameAnswer) {
  Answer plain;
  Request request = greedy({5, 7, 8, 7, 8}, 60, plain);
  request.ignore_eos = true;
  request.sampling.allowed_tokens = {7, 8};
  request.sampling.logit_bias = {{7, 3.0F}};  // mostly 7
  const Answer expected = alone(request);
  EngineOptions options = small_options(64);
  options.speculation = {.tokens = 4, .lookup_max = 3, .lookup_min = 1};
  const auto core = make_core(options);
  core->add(request);
  run_all(*core);
  EXPECT_EQ(plain.tokens, expected.tokens);
  const EngineStats stats = core->stats();
  EXPECT_LT(stats.steps, 50);
  EXPECT_EQ(stats.generated_tokens, 60);
  EXPECT_EQ(stats.steps + stats.speculation.accepted_tokens, 60);
  EXPECT_GE(stats.speculation.draft_tokens, stats.speculation.accepted_tokens);
  int64_t at_places = 0;
  for (const int64_t accepted : stats.speculation.accepted_at) {
    at_places += accepted;
  }
  EXPECT_EQ(at_places, stats.speculation.accepted_tokens);
}

TEST(Speculation, LeavesLargeStepsAlone) {
  for (const int64_t requests : {3, 16, 20}) {
    EngineOptions options = small_options(400);
    options.max_num_seqs = 20;
    options.max_num_batched_tokens = 200;
    options.speculation = {.tokens = 4, .lookup_max = 3, .lookup_min = 1};
    const auto core = make_core(options);
    std::vector<Answer> answers(static_cast<size_t>(requests));
    for (Answer& answer : answers) {
      Request request = greedy({5, 7, 8, 7, 8}, 30, answer);
      request.ignore_eos = true;
      request.sampling.allowed_tokens = {7, 8};
      core->add(std::move(request));
    }
    run_all(*core);
    EXPECT_EQ(core->stats().speculation.drafts > 0, requests < 16) << requests;
  }
}

TEST(Speculation, IsRefusedWhereTheDeviceSamples) {
  auto model = std::make_unique<FakeModel>();
  model->set_sampling(true);
  EngineOptions options = small_options(64);
  options.speculation = {.tokens = 4};
  const auto resolved = EngineCore::resolve(options, model->config());
  const auto core = EngineCore::create(std::move(model), *resolved);
  ASSERT_FALSE(core.ok());
  EXPECT_EQ(core.status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace nibble
