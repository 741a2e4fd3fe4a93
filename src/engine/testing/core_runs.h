#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "engine/engine_core.h"
#include "engine/testing/fake_model.h"

namespace nibble {

/// What a request has got so far.
struct Answer {
  std::vector<int32_t> tokens;
  std::vector<TokenEvent> events;
  std::vector<ScoredToken> prompt_logprobs;  // of the first event
  FinishReason finish = FinishReason::kNone;
  std::string error;
};

inline EngineOptions small_options(int64_t pages) {
  return {.max_num_seqs = 5,
          .max_num_batched_tokens = 12,
          .page_size = 4,
          .num_pages = pages,
          .kv_code = KvCode::kF32};
}

inline std::unique_ptr<EngineCore> make_core(const EngineOptions& options,
                                             std::unique_ptr<FakeModel> model = nullptr,
                                             std::unique_ptr<FakeModel> draft = nullptr) {
  if (!model) {
    model = std::make_unique<FakeModel>();
  }
  auto resolved = EngineCore::resolve(options, model->config());
  EXPECT_TRUE(resolved.ok()) << resolved.status().message();
  auto core = EngineCore::create(std::move(model), *resolved, std::move(draft));
  EXPECT_TRUE(core.ok());
  return std::move(core).value();
}

/// Tokens of a prompt, others for another `first`.
inline std::vector<int32_t> prompt_of(size_t length, int32_t first) {
  std::vector<int32_t> prompt(length);
  for (size_t i = 0; i < length; ++i) {
    prompt[i] = 4 + (first + static_cast<int32_t>(i * i)) % 60;
  }
  return prompt;
}

inline Request greedy(std::vector<int32_t> prompt, int64_t max_tokens, Answer& answer) {
  Request request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  request.sampling.temperature = 0;
  request.on_event = [&answer](TokenEvent event) {
    EXPECT_EQ(answer.finish, FinishReason::kNone) << "an event after the last";
    if (event.token >= 0) {
      answer.tokens.push_back(event.token);
    }
    if (answer.events.empty()) {
      answer.prompt_logprobs = event.prompt_logprobs;
    } else {
      EXPECT_TRUE(event.prompt_logprobs.empty());
    }
    answer.finish = event.finish;
    answer.error = event.failure.message();
    answer.events.push_back(std::move(event));
  };
  return request;
}

inline void run_all(EngineCore& core) {
  int64_t steps = 0;
  while (core.step()) {
    core.check_integrity();
    ASSERT_LT(++steps, 100000) << "no end";
  }
}

/// The oracle: one request alone, with pages for everything and no sharing.
inline Answer alone(const Request& request, const std::vector<int64_t>& windows = {}) {
  Answer answer;
  Request copy = request;
  copy.cancelled = std::make_shared<std::atomic<bool>>(false);
  copy.on_event = greedy({0}, 1, answer).on_event;
  EngineOptions options{.max_num_seqs = 1,
                        .max_num_batched_tokens = 256,
                        .page_size = 256,
                        .num_pages = 1,
                        .kv_code = KvCode::kF32,
                        .prefix_caching = false};
  auto model = std::make_unique<FakeModel>();
  if (!windows.empty()) {
    model->set_windows(windows);
  }
  const auto core = make_core(options, std::move(model));
  core->add(std::move(copy));
  run_all(*core);
  return answer;
}

/// Fills pages that nobody holds with nonsense, as others would with their tokens.
inline void poison_free_pages(const EngineCore& core, const FakeModel& model) {
  for (int64_t pool = 0; pool < core.pages().num_pools(); ++pool) {
    const BlockAllocator& pages = core.pages().pool(pool).allocator();
    for (int32_t page = 0; page < pages.num_pages(); ++page) {
      if (pages.ref_count(page) == 0) {
        model.poison(pool, page);
      }
    }
  }
}

}  // namespace nibble
