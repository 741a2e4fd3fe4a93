#include "offline_bench.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace nibble {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kWarmUpSteps = 2;

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// Decode steps that the first sequence may do before the last one begins: what the prefix cache
/// lacks of each prompt is at most a page and a token.
int64_t steps_ahead(const OfflineShape& shape, const EngineOptions& options) {
  const int64_t free = std::max<int64_t>(1, options.max_num_batched_tokens - shape.batch);
  return 1 + shape.batch * (options.page_size + 1) / free;
}

}  // namespace

Result<EngineOptions> OfflineBench::options_for(const OfflineShape& shape,
                                                const EngineOptions& base,
                                                const ModelConfig& config) {
  EngineOptions options = base;
  options.max_num_seqs = shape.batch;
  options.prefix_caching = true;
  options.max_num_batched_tokens = std::max(options.max_num_batched_tokens, shape.batch);
  const int64_t needed = shape.context + shape.input_len + shape.output_len + 1;
  const int64_t length = needed + steps_ahead(shape, options);
  if (length > config.max_position) {
    return make_error(StatusCode::kInvalidArgument,
                      "--context {} + --input-len {} + --output-len {} needs {} positions in all, "
                      "but the model's end at {} (config.json: max_position_embeddings)",
                      shape.context, shape.input_len, shape.output_len, length,
                      config.max_position);
  }
  options.max_model_len = length;
  // Contexts stay; the pages of two rounds, so that no context is evicted for the newer round.
  const auto pages = [&](int64_t tokens) { return tokens / options.page_size + 1; };
  options.num_pages = shape.batch * (pages(shape.context) + 2 * pages(length - shape.context) + 1);
  return EngineCore::resolve(options, config);
}

OfflineBench::OfflineBench(EngineCore& core, const OfflineShape& shape, uint64_t seed)
    : core_(core), shape_(shape), random_(seed) {
  for (int64_t i = 0; i < shape_.batch; ++i) {
    contexts_.push_back(random_tokens(shape_.context));
  }
}

std::vector<int32_t> OfflineBench::random_tokens(int64_t count) {
  std::uniform_int_distribution<int32_t> token(
      0, static_cast<int32_t>(core_.model_config().vocab_size - 1));
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::ranges::generate(tokens, [&] { return token(random_); });
  return tokens;
}

OfflineBench::Prompts OfflineBench::make_prompts(int64_t new_tokens) {
  Prompts prompts = contexts_;
  for (std::vector<int32_t>& prompt : prompts) {
    const std::vector<int32_t> tail = random_tokens(new_tokens);
    prompt.insert(prompt.end(), tail.begin(), tail.end());
  }
  return prompts;
}

void OfflineBench::add(const Prompts& prompts, int64_t max_tokens) {
  generated_.assign(prompts.size(), 0);
  for (size_t i = 0; i < prompts.size(); ++i) {
    Request request;
    request.prompt = prompts[i];
    request.max_tokens = max_tokens;
    request.ignore_eos = true;
    request.sampling.temperature = 0;
    request.on_event = [this, i](const TokenEvent& event) {
      if (event.token >= 0) {
        ++generated_[i];
        ++step_tokens_;
      }
      if (event.finish == FinishReason::kError && error_.empty()) {
        error_ = event.error;
      }
    };
    core_.add(std::move(request));
  }
}

Status OfflineBench::step() {
  step_tokens_ = 0;
  core_.step();
  return error_.empty() ? Status() : Status(StatusCode::kUnavailable, error_);
}

Status OfflineBench::run_all() {
  while (!core_.idle()) {
    NIBBLE_RETURN_IF_ERROR(step());
  }
  return {};
}

Status OfflineBench::decode(const Prompts& prompts, int64_t steps, std::vector<double>& step_ms) {
  add(prompts, core_.options().max_model_len);
  while (std::ranges::any_of(generated_, [](int64_t count) { return count == 0; })) {
    NIBBLE_RETURN_IF_ERROR(step());
  }
  for (int64_t i = 0; i < steps; ++i) {
    const auto begin = Clock::now();
    NIBBLE_RETURN_IF_ERROR(step());
    step_ms.push_back(ms_since(begin));
    CHECK_EQ(step_tokens_, shape_.batch);
  }
  core_.cancel_all();
  return step();  // what may be under way
}

Status OfflineBench::warm_up() {
  if (shape_.context > 0) {
    add(contexts_, 1);
    NIBBLE_RETURN_IF_ERROR(run_all());
  }
  const Prompts prompts = make_prompts(shape_.input_len);
  add(prompts, 1);
  NIBBLE_RETURN_IF_ERROR(run_all());
  std::vector<double> untimed;
  return decode(prompts, std::min(kWarmUpSteps, shape_.output_len), untimed);
}

Status OfflineBench::run_round(Timings& timings) {
  const Prompts prompts = make_prompts(shape_.input_len);
  const EngineStats before = core_.stats();
  add(prompts, 1);
  const auto begin = Clock::now();
  NIBBLE_RETURN_IF_ERROR(run_all());
  timings.prefill_ms.push_back(ms_since(begin));
  const EngineStats after = core_.stats();
  timings.prefill_tokens =
      (after.prompt_tokens - before.prompt_tokens) - (after.cached_tokens - before.cached_tokens);
  return decode(prompts, shape_.output_len, timings.decode_ms);
}

}  // namespace nibble
