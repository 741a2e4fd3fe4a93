#include "engine/speculation.h"

#include <algorithm>
#include <random>

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

TEST(Lookup, SaysWhetherItMayFindSomethingBehindOneTokenMore) {
  const Speculation options{.tokens = 8, .lookup_max = 3, .lookup_min = 3};
  EXPECT_TRUE(may_follow(Ids{1, 2, 9, 1, 2}, options));
  EXPECT_FALSE(may_follow(Ids{1, 2, 9, 2, 1}, options));
  EXPECT_FALSE(may_follow(Ids{1, 2}, options));  // they stand nowhere before
  EXPECT_TRUE(may_follow(Ids{7, 7, 7}, options));
  EXPECT_FALSE(may_follow(Ids{}, options));
  // Whatever comes, look_up() finds nothing where it says so, and something for some token where
  // it does not.
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    Ids tokens(random() % 12);
    std::ranges::generate(tokens, [&] { return static_cast<int32_t>(random() % 3); });
    const Speculation any{.lookup_max = 4, .lookup_min = 1 + static_cast<int64_t>(random() % 4)};
    bool found = false;
    for (int32_t next = 0; next < 3; ++next) {
      Ids longer = tokens;
      longer.push_back(next);
      found = found || !look_up(longer, any, 1).empty();
    }
    // One token, and the same again, is all that it may miss.
    EXPECT_TRUE(may_follow(tokens, any) == found || tokens.size() < 2) << round;
  }
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

/// A model whose steps take as long with proposals as without.
std::unique_ptr<FakeModel> even_model(bool samples) {
  auto model = std::make_unique<FakeModel>();
  model->set_step_time(std::chrono::microseconds(1000));
  model->set_sampling(samples);
  return model;
}

/// Says 7 mostly, and 8.
Request repetitive(bool samples, Answer& answer) {
  Request request = greedy({5, 7, 8, 7, 8}, 60, answer);
  request.ignore_eos = true;
  request.sampling.logit_bias = {{7, 33.0F}, {8, 30.0F}};
  if (!samples) {
    request.sampling.allowed_tokens = {7, 8};
  }
  return request;
}

EngineOptions lookup_options(int64_t pages) {
  EngineOptions options = small_options(pages);
  options.speculation = {.tokens = 4, .lookup_max = 3, .lookup_min = 1};
  return options;
}

TEST(Speculation, TakesFewerStepsForTheSameAnswer) {
  for (const bool samples : {false, true}) {
    Answer plain;
    const Request request = repetitive(samples, plain);
    const Answer expected = alone(request);
    const auto core = make_core(lookup_options(64), even_model(samples));
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
}

// What a row is sampled by depends on the tokens in front of it, of which some are only proposed.
TEST(Speculation, RowsOfADeviceAreSampledByTheTokensInFrontOfThem) {
  Answer answer;
  Request request = repetitive(true, answer);
  request.sampling.temperature = 1.0;
  request.sampling.seed = 5;
  request.sampling.frequency_penalty = 0.3;
  request.sampling.repetition_penalty = 1.2;
  request.bad_words = {{7, 7, 7, 8}, {8, 8}};
  request.min_tokens = 20;
  const Answer expected = alone(request);
  const auto core = make_core(lookup_options(64), even_model(true));
  core->add(request);
  run_all(*core);
  EXPECT_EQ(answer.tokens, expected.tokens);
  EXPECT_GT(core->stats().speculation.accepted_tokens, 0);
}

// A device runs ahead where no proposal can come, and does not where one may.
TEST(Speculation, StepsAreStartedAheadWhereNothingIsFound) {
  for (const bool repeats : {false, true}) {
    Answer answer;
    Request request = repetitive(true, answer);
    if (!repeats) {
      request.sampling.logit_bias.clear();
    }
    const Answer expected = alone(request);
    auto model = even_model(true);
    const FakeModel& watched = *model;
    EngineOptions options = lookup_options(64);
    options.speculation.lookup_min = options.speculation.lookup_max = 3;
    const auto core = make_core(options, std::move(model));
    core->add(request);
    run_all(*core);
    EXPECT_EQ(answer.tokens, expected.tokens);
    if (repeats) {
      EXPECT_LT(watched.fed_steps(), 25);
      EXPECT_GT(core->stats().speculation.accepted_tokens, 20);
    } else {
      EXPECT_GT(watched.fed_steps(), 40);
    }
  }
}

TEST(Speculation, LeavesLargeStepsAlone) {
  for (const int64_t requests : {3, 16, 20}) {
    EngineOptions options = small_options(400);
    options.max_num_seqs = 20;
    options.max_num_batched_tokens = 200;
    options.speculation = {.tokens = 4, .lookup_max = 3, .lookup_min = 1};
    const auto core = make_core(options, even_model(false));
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

}  // namespace
}  // namespace nibble
