#include "engine/draft_model.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

#include "arch/kv_specs.h"
#include "engine/sampler_inputs.h"
#include "engine/testing/core_runs.h"

namespace nibble {
namespace {

using std::chrono::microseconds;

EngineOptions draft_options(int64_t pages) {
  EngineOptions options = small_options(pages);
  options.speculation = {.tokens = 4, .draft_model = "elsewhere"};
  return options;
}

/// A draft model by itself, and sequences for it.
class Proposals final {
 public:
  explicit Proposals(const EngineOptions& options)
      : options_(EngineCore::resolve(options, config_).value()),
        draft_(DraftModel::create(std::make_unique<FakeModel>(), options_).value()) {}

  std::vector<int32_t> operator()(Sequence& sequence, int64_t count) {
    sequence.draft.clear();
    const DraftModel::Wish wish{&sequence, count};
    draft_->propose({&wish, 1},
                    [this](const Sequence& of, int64_t ahead) { return inputs_.next(of, ahead); });
    return sequence.draft;
  }
  [[nodiscard]] int64_t free_pages() const { return draft_->pages().pool(0).available_pages(); }

 private:
  const ModelConfig config_ = FakeModel().config();
  const EngineOptions options_;
  SamplerInputs inputs_{config_};
  std::unique_ptr<DraftModel> draft_;
};

Sequence sequence_of(const Request& request) {
  Sequence sequence;
  sequence.request = request;
  sequence.tokens = request.prompt;
  sequence.prompt_tokens = sequence.length();
  sequence.seed = request.sampling.seed.value_or(0);
  return sequence;
}

/// What the same model answers by itself.
std::vector<int32_t> answer_to(const Request& request, const std::vector<int32_t>& prompt) {
  Request copy = request;
  copy.prompt = prompt;
  return alone(copy).tokens;
}

// A model like the served one says what that will say, however its proposals fared before: what was
// wrong is out of its cache.
TEST(DraftModel, SaysWhatFollowsAfterEveryRejection) {
  Answer unused;
  Request request = greedy({5, 6, 7}, 4, unused);
  request.ignore_eos = true;
  Proposals propose(draft_options(64));
  Sequence sequence = sequence_of(request);
  for (int32_t round = 0; round < 40; ++round) {
    const std::vector<int32_t> draft = propose(sequence, 4);
    ASSERT_EQ(draft, answer_to(request, sequence.tokens)) << round;
    const auto right = static_cast<std::ptrdiff_t>(round % 5);
    sequence.tokens.insert(sequence.tokens.end(), draft.begin(), draft.begin() + right);
    sequence.tokens.push_back(10 + round % 50);  // what the served model would have sampled
  }
}

TEST(DraftModel, SamplesWithTheRandomNumbersOfTheAnswer) {
  Answer unused;
  Request request = greedy({5, 6, 7}, 4, unused);
  request.ignore_eos = true;
  request.sampling.temperature = 1.0;
  request.sampling.top_p = 0.9;
  Proposals propose(draft_options(64));
  for (const uint64_t seed : {1, 2, 3, 4}) {
    request.sampling.seed = seed;
    Sequence sequence = sequence_of(request);
    EXPECT_EQ(propose(sequence, 4), answer_to(request, request.prompt)) << seed;
  }
}

TEST(DraftModel, ReadsALongPromptInSeveralSteps) {
  Answer unused;
  Request request = greedy(std::vector<int32_t>(30, 9), 2, unused);
  request.ignore_eos = true;
  Proposals propose(draft_options(64));  // steps of 12 tokens
  Sequence sequence = sequence_of(request);
  EXPECT_TRUE(propose(sequence, 2).empty());
  EXPECT_TRUE(propose(sequence, 2).empty());
  EXPECT_EQ(propose(sequence, 2), answer_to(request, request.prompt));
}

TEST(DraftModel, GivesItsPagesBackWithASequence) {
  Answer unused;
  EngineOptions options = draft_options(64);
  const int64_t page =
      KvCacheShape::equal_pools(kv_specs(FakeModel().config(), KvCode::kF32), 4, 1).bytes();
  options.draft_kv_bytes = 3 * page;
  Proposals propose(options);
  ASSERT_EQ(propose.free_pages(), 3);
  {
    Sequence sequence = sequence_of(greedy({5, 6, 7, 8, 9}, 4, unused));
    EXPECT_EQ(propose(sequence, 3).size(), 3U);  // 7 tokens in the cache
    EXPECT_EQ(propose.free_pages(), 1);
    Sequence other = sequence_of(greedy({5, 6, 7, 8, 9}, 4, unused));
    EXPECT_TRUE(propose(other, 3).empty());  // not for both
    EXPECT_EQ(propose.free_pages(), 1);
    EXPECT_EQ(propose(sequence, 4).size(), 4U);
  }
  EXPECT_EQ(propose.free_pages(), 3);
}

/// What an engine did for one answer of 60 tokens.
struct Outcome {
  Answer answer;
  EngineStats stats;
};

enum class Samples : uint8_t { kHost, kDevice };

Outcome run_with_draft(Request request,
                       microseconds target_step,
                       microseconds draft_step,
                       Samples where = Samples::kHost) {
  Outcome run;
  request.on_event = greedy({0}, 1, run.answer).on_event;
  auto model = std::make_unique<FakeModel>();
  model->set_step_time(target_step);
  model->set_sampling(where == Samples::kDevice);
  auto draft = std::make_unique<FakeModel>();
  draft->set_step_time(draft_step);
  draft->set_differs(8);
  draft->set_sampling(where == Samples::kDevice);
  const auto core = make_core(draft_options(64), std::move(model), std::move(draft));
  core->add(std::move(request));
  run_all(*core);
  run.stats = core->stats();
  return run;
}

TEST(Speculator, TakesFewerStepsForTheSameAnswer) {
  Answer unused;
  for (const Samples where : {Samples::kHost, Samples::kDevice}) {
    for (const double temperature : {0.0, 1.0}) {
      Request request = greedy({5, 7, 8, 7, 8}, 60, unused);
      request.ignore_eos = true;
      request.sampling.temperature = temperature;
      request.sampling.seed = 3;
      const Outcome run = run_with_draft(request, microseconds(5000), microseconds(10), where);
      EXPECT_EQ(run.answer.tokens, alone(request).tokens);
      EXPECT_LT(run.stats.steps, 35);
      EXPECT_EQ(run.stats.steps + run.stats.speculation.accepted_tokens, 60);
    }
  }
}

TEST(Speculator, SeldomAsksAModelThatTakesTooLong) {
  Answer unused;
  Request request = greedy({5, 7, 8, 7, 8}, 60, unused);
  request.ignore_eos = true;
  const Outcome run = run_with_draft(request, microseconds(200), microseconds(2000));
  EXPECT_EQ(run.answer.tokens, alone(request).tokens);
  EXPECT_GT(run.stats.speculation.drafts, 0);
  EXPECT_LT(run.stats.speculation.drafts, 10);
}

}  // namespace
}  // namespace nibble
