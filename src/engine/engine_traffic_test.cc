#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "arch/kv_specs.h"
#include "engine/testing/core_runs.h"
#include "model/testing/sequence_runner.h"

namespace nibble {
namespace {

struct Traffic {
  bool sampling = false;
  int64_t dynamic_from = 0;
  std::vector<int64_t> windows = {};  // of layers
  int64_t stretch = 1;                // of prompts, answers and pages
  bool speculation = false;
  bool draft = false;  // by a model that is often right
};

class Dice final {
 public:
  explicit Dice(uint32_t seed) : random_(seed) {}
  int64_t operator()(int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random_);
  }

 private:
  std::mt19937 random_;
};

EngineOptions random_options(const Traffic& traffic, uint32_t round, Dice& pick) {
  EngineOptions options{.max_num_seqs = pick(1, 8),
                        .max_num_batched_tokens = pick(1, 24),
                        .max_mixed_prefill = pick(0, 1) == 0 ? 0 : pick(1, 8),
                        .max_prompt_rows = pick(1, 12),
                        .page_size = pick(1, 6) * traffic.stretch,
                        .num_pages = pick(8, 40),
                        .draft_kv_bytes = pick(2, 60) * 2048,
                        .kv_code = KvCode::kF32,
                        .prefix_caching = round % 4 != 3};
  if (traffic.speculation) {
    options.speculation = {.tokens = pick(1, 6), .lookup_max = pick(2, 4), .lookup_min = 1};
  }
  return options;
}

std::unique_ptr<FakeModel> make_model(const Traffic& traffic, EngineOptions& options, Dice& pick) {
  auto model = std::make_unique<FakeModel>();
  model->set_sampling(traffic.sampling);
  if (traffic.speculation) {
    model->set_step_time(std::chrono::microseconds(20));  // however many rows it has
  }
  if (traffic.dynamic_from > 0) {
    model->set_dynamic_rope(traffic.dynamic_from);
  }
  if (!traffic.windows.empty()) {
    model->set_windows(traffic.windows);
    for (const KvPool& pool : kv_pools(kv_specs(model->config(), options.kv_code))) {
      options.pool_pages.push_back(pool.spec.window > 0 ? pick(6, 20) : pick(8, 40));
    }
  }
  return model;
}

// Few different beginnings, so that prompts share pages.
std::vector<int32_t> random_prompt(const Traffic& traffic, int64_t longest, Dice& pick) {
  std::vector<int32_t> prompt(
      static_cast<size_t>(pick(1, std::min<int64_t>(longest, 30 * traffic.stretch))));
  const auto family = static_cast<int32_t>(pick(0, 2));
  const int64_t branch = pick(0, 30 * traffic.stretch);
  for (size_t i = 0; i < prompt.size(); ++i) {
    const auto at = static_cast<int32_t>(i);
    prompt[i] = at < branch ? 4 + (family * 7 + at) % 20 : static_cast<int32_t>(pick(4, 63));
  }
  return prompt;
}

Request random_request(const Traffic& traffic, int64_t longest, Dice& pick, Answer& answer) {
  std::vector<int32_t> prompt = random_prompt(traffic, longest, pick);
  Request request = greedy(std::move(prompt), pick(1, 40 * traffic.stretch), answer);
  if (pick(0, 3) == 0) {
    request.prompt_logprobs = static_cast<int>(pick(0, 3));
  }
  if (traffic.speculation && pick(0, 2) > 0) {  // what follows can be guessed
    if (traffic.sampling) {
      request.sampling.logit_bias = {{7, 30.0F}, {8, 30.0F}, {FakeModel::kEos, 28.0F}};
    } else {
      request.sampling.allowed_tokens = {7, 8, FakeModel::kEos};
      request.sampling.logit_bias = {{FakeModel::kEos, -2.0F}};
    }
  }
  if (pick(0, 9) == 0) {
    request.max_tokens = 0;
  }
  request.client = pick(0, 2);
  request.share = request.client == 2 ? 3 : 1;
  if (pick(0, 5) == 0) {
    request.priority = pick(-2, 2);
    request.cache_salt = pick(0, 1) == 0 ? "a" : "";
  }
  if (pick(0, 3) == 0) {
    request.sampling.temperature = 0.8;
    request.sampling.seed = static_cast<uint64_t>(pick(0, 1000));
    request.sampling.frequency_penalty = traffic.sampling ? 0.0 : 0.2;
  }
  request.min_tokens = pick(0, 3) == 0 ? 4 : 0;
  return request;
}

// A cancelled answer is a beginning of what the request gets alone, any other is all of it.
void check_answer(const Answer& answer, const Answer& expected, const Request& request) {
  if (answer.finish == FinishReason::kCancelled) {
    ASSERT_LE(answer.tokens.size(), expected.tokens.size());
    ASSERT_TRUE(std::equal(answer.tokens.begin(), answer.tokens.end(), expected.tokens.begin()));
    return;
  }
  ASSERT_EQ(answer.tokens, expected.tokens);
  ASSERT_EQ(answer.finish, expected.finish);
  ASSERT_EQ(answer.prompt_logprobs, expected.prompt_logprobs);
  const size_t scored = request.prompt_logprobs < 0 ? 0 : request.prompt.size() - 1;
  ASSERT_EQ(expected.prompt_logprobs.size(), scored);
}

/// What happened in all rounds.
struct Met {
  int64_t fed_steps = 0, preemptions = 0, cached = 0, cancelled = 0, accepted = 0;
};

void run_round(const Traffic& traffic, uint32_t round, Met& met) {
  Dice pick(round);
  EngineOptions options = random_options(traffic, round, pick);
  auto model = make_model(traffic, options, pick);
  const FakeModel& watched = *model;
  std::unique_ptr<FakeModel> draft;
  if (traffic.draft) {
    draft = std::make_unique<FakeModel>();
    draft->set_differs(5);
    draft->set_sampling(traffic.sampling);
  }
  const auto core = make_core(options, std::move(model), std::move(draft));
  const int64_t longest = core->options().max_model_len - 1;
  constexpr size_t kRequests = 100;
  std::vector<Answer> answers(kRequests);
  std::vector<Request> requests;
  int64_t steps = 0;
  while (requests.size() < kRequests || !core->idle()) {
    ASSERT_LT(++steps, 200000);
    while (requests.size() < kRequests && pick(0, 3) == 0) {
      requests.push_back(random_request(traffic, longest, pick, answers[requests.size()]));
      core->add(requests.back());
    }
    if (!requests.empty() && pick(0, 40) == 0) {
      const auto victim = static_cast<size_t>(pick(0, std::ssize(requests) - 1));
      requests[victim].cancelled->store(true);
    }
    core->step();
    core->check_integrity();
    poison_free_pages(*core, watched);
    ASSERT_LE(core->stats().running, core->options().max_num_seqs);
  }
  const EngineStats stats = core->stats();
  met.fed_steps += watched.fed_steps();
  met.preemptions += stats.preemptions;
  met.cached += stats.cached_tokens;
  met.accepted += stats.speculation.accepted_tokens;
  EXPECT_EQ(stats.pages_used, 0);
  for (const auto& [client, count] : core->never_admitted()) {
    EXPECT_EQ(count, 0) << client;
  }
  if (const DraftModel* proposer = core->speculator().draft_model()) {
    const PagePool& pages = proposer->pages().pool(0);
    EXPECT_EQ(pages.available_pages(), pages.allocator().num_pages());
  }
  for (size_t i = 0; i < kRequests; ++i) {
    Request bounded = requests[i];
    bounded.max_tokens =
        std::min(bounded.max_tokens,
                 core->options().max_model_len - static_cast<int64_t>(bounded.prompt.size()));
    SCOPED_TRACE(fmt::format("round {} request {}", round, i));
    ASSERT_NO_FATAL_FAILURE(check_answer(answers[i], alone(bounded, traffic.windows), bounded));
    met.cancelled += answers[i].finish == FinishReason::kCancelled ? 1 : 0;
  }
}

// Thousands of random arrivals and cancellations over few pages: every answer is what the request
// gets alone, a cancelled one a beginning of it, and the books balance after every step. Pages that
// were given back hold nonsense.
void random_traffic(const Traffic& traffic) {
  Met met;
  for (uint32_t round = 0; round < 24; ++round) {
    ASSERT_NO_FATAL_FAILURE(run_round(traffic, round, met));
  }
  // The traffic met what it is meant to meet.
  EXPECT_GT(met.preemptions, 100);
  EXPECT_GT(met.cached, 800);
  EXPECT_GT(met.cancelled, 20);
  EXPECT_EQ(met.fed_steps > (traffic.speculation ? 100 : 1000), traffic.sampling);
  EXPECT_EQ(met.accepted > (traffic.draft ? 100 : 1000), traffic.speculation);
}

TEST(EngineCore, RandomTrafficEqualsSequentialRuns) { random_traffic({}); }

TEST(EngineCore, RandomTrafficOfStepsStartedAheadEqualsSequentialRuns) {
  random_traffic({.sampling = true});
}

TEST(EngineCore, RandomTrafficWithDynamicRopeEqualsSequentialRuns) {
  random_traffic({.sampling = true, .dynamic_from = 16});
}

TEST(EngineCore, RandomTrafficWithWindowsEqualsSequentialRuns) {
  random_traffic({.windows = {0, 9, 0, 70}, .stretch = 3});
}

TEST(EngineCore, RandomTrafficWithWindowsAloneAndStepsStartedAheadEqualsSequentialRuns) {
  random_traffic({.sampling = true, .windows = {20, 20}, .stretch = 3});
}

TEST(EngineCore, RandomTrafficWithSpeculationEqualsSequentialRuns) {
  random_traffic({.speculation = true});
}

TEST(EngineCore, RandomTrafficWithSpeculationAndWindowsEqualsSequentialRuns) {
  random_traffic({.windows = {0, 9, 0, 70}, .stretch = 3, .speculation = true});
}

TEST(EngineCore, RandomTrafficWithADraftModelEqualsSequentialRuns) {
  random_traffic({.speculation = true, .draft = true});
}

TEST(EngineCore, RandomTrafficWithSpeculationOnADeviceEqualsSequentialRuns) {
  random_traffic({.sampling = true, .speculation = true});
}

TEST(EngineCore, RandomTrafficWithSpeculationAndWindowsOnADeviceEqualsSequentialRuns) {
  random_traffic({.sampling = true, .windows = {0, 9, 0, 70}, .stretch = 3, .speculation = true});
}

TEST(EngineCore, RandomTrafficWithADraftModelOnADeviceEqualsSequentialRuns) {
  random_traffic({.sampling = true, .dynamic_from = 16, .speculation = true, .draft = true});
}

// 32k tokens over a window of 512: one pool keeps all pages, the other those of its window and of
// one step.
TEST(EngineCore, WindowsGivePagesBack) {
  auto model = std::make_unique<FakeModel>(64, 32768);
  model->set_windows({0, 512});
  const FakeModel& watched = *model;
  const EngineOptions options{.max_num_seqs = 2,
                              .max_num_batched_tokens = 1024,
                              .page_size = 16,
                              .num_pages = 2048,
                              .kv_code = KvCode::kF32};
  const auto core = make_core(options, std::move(model));
  Answer answer;
  std::vector<int32_t> prompt(32000);
  for (size_t i = 0; i < prompt.size(); ++i) {
    prompt[i] = static_cast<int32_t>(4 + i * i % 59);
  }
  Request request = greedy(prompt, 40, answer);
  request.ignore_eos = true;
  core->add(request);
  int64_t peak = 0;         // between steps
  int64_t decode_peak = 0;  // once the prompt is done
  while (core->step()) {
    core->check_integrity();
    poison_free_pages(*core, watched);
    const EngineStats stats = core->stats();
    ASSERT_EQ(stats.pools.size(), 2U);
    EXPECT_EQ(stats.pools[1].window, 512);
    peak = std::max(peak, stats.pools[1].pages_used);
    decode_peak = answer.tokens.size() > 1 ? std::max(decode_peak, stats.pools[1].pages_used) : 0;
    if (answer.tokens.size() == 30) {
      EXPECT_EQ(stats.pools[0].pages_used, (32000 + 29 + 15) / 16);
    }
  }
  // 512 tokens back from a token, from the beginning of 64: 36 pages at most, and its own.
  EXPECT_LE(peak, 37);
  EXPECT_GE(decode_peak, 512 / 16);
  EXPECT_EQ(answer.tokens.size(), 40U);

  // The same prompt again: all but its last page is served, by the last window of the second pool.
  Answer again;
  request.on_event = greedy({0}, 1, again).on_event;
  core->add(request);
  while (core->step()) {
    core->check_integrity();
    poison_free_pages(*core, watched);
  }
  EXPECT_EQ(again.tokens, answer.tokens);
  EXPECT_EQ(again.events.back().cached_tokens, 31984);
}

constexpr int64_t kAnswer = 100;

/// Greedy continuation of a prompt by a model on its own, with all pages kept.
std::vector<int32_t> continuation(Model& model,
                                  const Backend& backend,
                                  KvCode code,
                                  const std::vector<int32_t>& tokens) {
  SequenceRunner runner(model, backend, code);
  std::vector<float> logits = runner.feed(tokens);
  std::vector<int32_t> answer;
  for (int64_t i = 0; i < kAnswer; ++i) {
    const auto last = logits.end() - model.config().vocab_size;
    answer.push_back(static_cast<int32_t>(std::max_element(last, logits.end()) - last));
    logits = runner.feed({&answer.back(), 1});
  }
  return answer;
}

struct PoolCase {
  KvCode code = KvCode::kBf16;
  int64_t page_size = 16;
  int64_t pages = 64;         // of pools without a window
  int64_t window_pages = 22;  // of the others
  int64_t drafted = 0;        // tokens, looked up
};

// Real layers over pages that are given back, in pools with just the pages that they need, against
// a cache that keeps all: windows in every other layer, and in all.
void check_models_with_windows(const PoolCase& how) {
  for (const char* name : {"qwen2_window", "mistral"}) {
    SCOPED_TRACE(name);
    const auto backend = make_cpu_backend({.threads = 2}).value();
    const ModelOptions sizes{.max_batch_tokens = 400, .max_logit_rows = 400};
    auto model = load_model(std::string("tests/golden/") + name, *backend, sizes).value();
    EngineOptions options{.max_num_seqs = 2,
                          .max_num_batched_tokens = 48,
                          .page_size = how.page_size,
                          .kv_code = how.code};
    options.speculation = {.tokens = how.drafted, .lookup_max = 3, .lookup_min = 1};
    for (const KvPool& pool : kv_pools(kv_specs(model->config(), options.kv_code))) {
      options.pool_pages.push_back(pool.spec.window > 0 ? how.window_pages : how.pages);
    }
    const EngineOptions resolved = EngineCore::resolve(options, model->config()).value();
    EXPECT_EQ(resolved.max_model_len, 512);  // although few pages hold so much
    std::vector<std::vector<int32_t>> prompts(3, std::vector<int32_t>(300));
    for (size_t i = 0; i < 300; ++i) {
      prompts[0][i] = prompts[1][i] = static_cast<int32_t>(3 + i * i % 53);
      prompts[2][i] = static_cast<int32_t>(3 + i * 7 % 51);
    }
    prompts[1].resize(270);  // the beginning of the first: a hit that ends inside it
    std::vector<std::vector<int32_t>> expected;
    expected.reserve(prompts.size());
    for (const auto& prompt : prompts) {
      expected.push_back(continuation(*model, *backend, how.code, prompt));
    }
    const auto core = EngineCore::create(std::move(model), resolved).value();
    std::vector<Answer> answers(prompts.size());
    for (size_t i = 0; i < prompts.size(); ++i) {
      Request request = greedy(prompts[i], kAnswer, answers[i]);
      request.ignore_eos = true;
      core->add(std::move(request));
      if (i == 0) {
        run_all(*core);
      }
    }
    run_all(*core);
    for (size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(answers[i].tokens, expected[i]) << "prompt " << i;
    }
    EXPECT_EQ(answers[1].events.back().cached_tokens, 256);
    EXPECT_EQ(core->stats().pages_used, 0);
  }
}

TEST(EngineCore, ModelsWithWindowsAnswerAsWithAllPages) { check_models_with_windows({}); }

// Keys without codes are in a pool of their own, whose pages come and go; tokens that were proposed
// in vain, at the end of a page too, leave nothing behind.
TEST(EngineCore, PagesOfKeysAnswerAsWithAllPages) {
  for (const int64_t drafted : {0, 5}) {
    check_models_with_windows({.code = KvCode::kInt4Page,
                               .page_size = kChannelTokens,
                               .pages = 16,
                               .window_pages = 10,
                               .drafted = drafted});
  }
}

}  // namespace
}  // namespace nibble
