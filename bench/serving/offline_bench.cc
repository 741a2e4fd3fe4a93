#include "bench/serving/offline_bench.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace nibble {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kWarmUpSteps = 2;
constexpr int64_t kTurnSteps = 8;  // short, since a shared host changes its speed within seconds

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

/// Decode steps that the first sequence may do before the last one begins: what the prefix cache
/// lacks of each prompt is at most a page and a token.
int64_t steps_ahead(const OfflineShape& shape, const EngineOptions& options) {
  const int64_t free = std::max<int64_t>(1, options.max_num_batched_tokens - shape.batch);
  return 1 + shape.batch * (options.page_size + 1) / free;
}

/// Positions of its sequences: the prompt, a token to decode from, and what is decoded.
int64_t positions_of(const OfflineShape& shape, const EngineOptions& options) {
  return shape.context + shape.input_len + 1 + shape.output_len + 1 + steps_ahead(shape, options);
}

Status check_positions(const OfflineShape& shape, int64_t positions, const ModelConfig& config) {
  if (positions <= config.max_position) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument,
                    "--context {} + --input-len {} + --output-len {} needs {} positions in all, "
                    "but the model's end at {} (config.json: {})",
                    shape.context, shape.input_len, shape.output_len, positions,
                    config.max_position, positions_name(config));
}

}  // namespace

Result<EngineOptions> OfflineBench::options_for(std::span<const OfflineShape> shapes,
                                                const EngineOptions& base,
                                                const ModelConfig& config) {
  EngineOptions options = base;
  options.max_num_seqs = 0;
  options.max_model_len = 0;
  options.num_pages = 0;
  options.prefix_caching = true;
  for (const OfflineShape& shape : shapes) {
    options.max_num_seqs = std::max(options.max_num_seqs, shape.batch);
  }
  options.max_num_batched_tokens = std::max(options.max_num_batched_tokens, options.max_num_seqs);
  const auto pages = [&](int64_t tokens) { return tokens / options.page_size + 1; };
  for (const OfflineShape& shape : shapes) {
    const int64_t length = positions_of(shape, options);
    NIBBLE_RETURN_IF_ERROR(check_positions(shape, length, config));
    options.max_model_len = std::max(options.max_model_len, length);
    // Contexts stay; the pages of two rounds, so that no context is evicted for the newer round.
    options.num_pages +=
        shape.batch * (pages(shape.context) + 2 * pages(length - shape.context) + 1);
  }
  return EngineCore::resolve(options, config);
}

int64_t OfflineBench::decode_length(const OfflineShape& shape, size_t shapes) {
  const int64_t steps = shapes == 1 ? shape.output_len : std::min(kTurnSteps, shape.output_len);
  return shape.context + shape.input_len + steps / 2;
}

OfflineBench::OfflineBench(EngineCore& core, std::span<const OfflineShape> shapes, uint64_t seed)
    : core_(core), random_(seed), timings_(shapes.size()) {
  for (const OfflineShape& shape : shapes) {
    Lane& lane = lanes_.emplace_back(Lane{.shape = shape, .contexts = {}, .prompts = {}});
    for (int64_t i = 0; i < shape.batch; ++i) {
      lane.contexts.push_back(random_tokens(shape.context));
    }
  }
}

std::vector<int32_t> OfflineBench::random_tokens(int64_t count) {
  std::uniform_int_distribution<int32_t> token(
      0, static_cast<int32_t>(core_.model_config().vocab_size - 1));
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  std::ranges::generate(tokens, [&] { return token(random_); });
  return tokens;
}

OfflineBench::Prompts OfflineBench::make_prompts(const Lane& lane) {
  Prompts prompts = lane.contexts;
  for (std::vector<int32_t>& prompt : prompts) {
    const std::vector<int32_t> tail = random_tokens(lane.shape.input_len);
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
      if (event.finish == FinishReason::kError && failure_.ok()) {
        failure_ = event.failure;
      }
    };
    core_.add(std::move(request));
  }
}

Status OfflineBench::step() {
  step_tokens_ = 0;
  core_.step();
  return failure_;
}

Status OfflineBench::run_all() {
  while (!core_.idle()) {
    NIBBLE_RETURN_IF_ERROR(step());
  }
  return {};
}

Status OfflineBench::prefill(const Lane& lane, OfflineTimings& timings) {
  const EngineStats before = core_.stats();
  add(lane.prompts, 1);
  const auto begin = Clock::now();
  NIBBLE_RETURN_IF_ERROR(run_all());
  timings.prefills.push_back({.ms = ms_since(begin)});
  const EngineStats after = core_.stats();
  timings.prefill_tokens =
      (after.prompt_tokens - before.prompt_tokens) - (after.cached_tokens - before.cached_tokens);
  return {};
}

Status OfflineBench::decode(const Lane& lane,
                            int64_t steps,
                            const OfflineMeter& meter,
                            OfflineTimings& timings) {
  Prompts prompts = lane.prompts;
  for (std::vector<int32_t>& prompt : prompts) {
    prompt.push_back(random_tokens(1)[0]);  // where prompts end with a page, all that is computed
  }
  add(prompts, core_.options().max_model_len);
  while (std::ranges::any_of(generated_, [](int64_t count) { return count == 0; })) {
    NIBBLE_RETURN_IF_ERROR(step());
  }
  const ExpertCounts experts = core_.expert_counts();
  double before = meter.read_gbps();
  for (int64_t done = 0; done < steps;) {
    OfflineTimings::Turn& turn = timings.turns.back().emplace_back();
    for (const int64_t end = std::min(steps, done + kTurnSteps); done < end; ++done) {
      const auto begin = Clock::now();
      NIBBLE_RETURN_IF_ERROR(step());
      turn.step_ms.push_back(ms_since(begin));
      CHECK_EQ(step_tokens_, lane.shape.batch);
    }
    const double after = meter.read_gbps();
    turn.read_gbps = (before + after) / 2;
    before = after;
  }
  timings.decode_experts += core_.expert_counts() - experts;
  core_.cancel_all();
  return step();  // what may be under way
}

Status OfflineBench::warm_up() {
  for (Lane& lane : lanes_) {
    lane.prompts = lane.shape.context > 0 ? lane.contexts : make_prompts(lane);
    add(lane.prompts, 1);
    NIBBLE_RETURN_IF_ERROR(run_all());
    OfflineTimings untimed;
    untimed.turns.emplace_back();
    NIBBLE_RETURN_IF_ERROR(
        decode(lane, std::min(kWarmUpSteps, lane.shape.output_len), OfflineMeter(), untimed));
  }
  return {};
}

Status OfflineBench::run_round(const OfflineMeter& meter) {
  double before = meter.peak_tops();
  for (size_t i = 0; i < lanes_.size(); ++i) {
    lanes_[i].prompts = make_prompts(lanes_[i]);
    NIBBLE_RETURN_IF_ERROR(prefill(lanes_[i], timings_[i]));
    const double after = meter.peak_tops();
    timings_[i].prefills.back().peak_tops = (before + after) / 2;
    before = after;
    timings_[i].turns.emplace_back();
  }
  const int64_t steps = lanes_.front().shape.output_len;
  const int64_t at_once = lanes_.size() == 1 ? steps : kTurnSteps;
  for (int64_t done = 0; done < steps; done += at_once) {
    for (size_t i = 0; i < lanes_.size(); ++i) {
      NIBBLE_RETURN_IF_ERROR(
          decode(lanes_[i], std::min(at_once, steps - done), meter, timings_[i]));
    }
  }
  return {};
}

}  // namespace nibble
