#include "engine/engine_core.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "arch/kv_specs.h"
#include "base/check.h"
#include "base/log.h"
#include "engine/bad_words.h"
#include "engine/memory_plan.h"
#include "engine/page_shares.h"
#include "engine/pooled_states.h"
#include "model/not_finite.h"

namespace nibble {
namespace {

SchedulerLimits limits_of(const EngineOptions& options, const ModelConfig& config) {
  SchedulerLimits limits{.max_num_seqs = options.max_num_seqs,
                         .max_num_batched_tokens = options.max_num_batched_tokens,
                         .max_prompt_rows = options.max_prompt_rows,
                         .page_size = options.page_size};
  if (config.rope.kind == RopeKind::kDynamicNtk) {
    limits.longest_shared_prompt = config.rope.original_max_position;
  }
  return limits;
}

KvCacheShape cache_shape(const EngineOptions& options, const ModelConfig& config) {
  return {.layers = kv_specs(config, options.kv_code),
          .page_size = options.page_size,
          .num_pages = options.pool_pages};
}

// Limits far above any use: they keep products of options in int64.
constexpr int64_t kMostPerStep = int64_t{1} << 20;
constexpr int64_t kMostPageSize = 4096;
constexpr int64_t kPageSize = 16;  // of CPUs
constexpr int64_t kKvBytes = int64_t{1} << 30;
// One or more for each size of tiles that products and attention have.
constexpr int64_t kWarmUpLengths[] = {1, 16, 32, 64, 128, 256, 512, 1024, 2048};
constexpr int64_t kMostPositions = int64_t{1} << 31;

// `name` is the flag of `nibble serve` that sets the option.
Status require_between(const char* name, int64_t value, int64_t most) {
  if (value > 0 && value <= most) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, "{} {}: must be between 1 and {}", name, value,
                    most);
}

// Finds out.pool_pages, and limits out.max_model_len to what they hold.
Status resolve_pages(EngineOptions& out, const ModelConfig& config, const Backend* backend) {
  const KvCacheShape shape = cache_shape(out, config);
  const std::vector<KvPool> pools = kv_pools(shape.layers);
  if (out.pool_pages.empty() && out.num_pages > 0) {
    out.pool_pages.assign(pools.size(), out.num_pages);
  } else if (out.pool_pages.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(out.pool_pages,
                            share_pages(shape, useful_pages(out, pools), out.kv_bytes, backend));
  }
  CHECK_EQ(out.pool_pages.size(), pools.size());
  out.num_pages = std::ranges::max(out.pool_pages);
  int64_t longest = out.max_model_len;
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    longest = std::min(
        longest, longest_sequence(pools[pool].spec.window, out.page_size, out.pool_pages[pool]));
  }
  if (longest < out.max_model_len) {
    NIBBLE_LOG(kWarning, "the KV cache holds {} tokens: max_model_len is {} instead of {}", longest,
               longest, out.max_model_len);
    out.max_model_len = longest;
  }
  return {};
}

}  // namespace

Result<EngineOptions> EngineCore::resolve(const EngineOptions& options,
                                          const ModelConfig& config,
                                          const Backend* backend) {
  EngineOptions out = options;
  if (out.page_size == 0) {
    out.page_size = backend != nullptr ? backend->preferred_page_size(out.kv_code) : kPageSize;
  }
  out.kv_bytes = out.kv_bytes == 0 ? kKvBytes : out.kv_bytes;
  NIBBLE_RETURN_IF_ERROR(require_between("--max-num-seqs", out.max_num_seqs, kMostPerStep));
  NIBBLE_RETURN_IF_ERROR(
      require_between("--max-num-batched-tokens", out.max_num_batched_tokens, kMostPerStep));
  NIBBLE_RETURN_IF_ERROR(
      require_between("--max-queued-requests", out.max_queued_requests, kMostPerStep));
  NIBBLE_RETURN_IF_ERROR(require_between("--block-size", out.page_size, kMostPageSize));
  if (out.max_model_len < 0 || out.num_pages < 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "--max-model-len {} and the number of pages {} must not be negative",
                      out.max_model_len, out.num_pages);
  }
  if (out.max_model_len == 0) {
    out.max_model_len = config.max_position;
  }
  if (config.max_position > 0 && out.max_model_len > config.max_position) {
    return make_error(StatusCode::kInvalidArgument,
                      "--max-model-len {}: the model's positions end at {} "
                      "(config.json: {})",
                      out.max_model_len, config.max_position, positions_name(config));
  }
  NIBBLE_RETURN_IF_ERROR(require_between("--max-model-len", out.max_model_len, kMostPositions));
  out.max_num_batched_tokens = std::max(out.max_num_batched_tokens, out.max_num_seqs);
  out.max_prompt_rows = prompt_rows(out, config);
  NIBBLE_RETURN_IF_ERROR(resolve_pages(out, config, backend));
  return out;
}

Status EngineCore::check(const Request& request,
                         const EngineOptions& options,
                         const ModelConfig& config) {
  const auto invalid = StatusCode::kInvalidArgument;
  if (request.prompt.empty()) {
    return make_error(invalid, "the prompt has no tokens");
  }
  const auto length = static_cast<int64_t>(request.prompt.size());
  const int64_t answer = request.max_tokens == 0 ? 0 : 1;
  if (length > options.max_model_len - answer) {
    return make_error(invalid,
                      "the prompt has {} tokens, but the limit is {} (max_model_len {} less {} "
                      "token of answer)",
                      length, options.max_model_len - answer, options.max_model_len, answer);
  }
  for (const int32_t token : request.prompt) {
    if (token < 0 || token >= config.vocab_size) {
      return make_error(invalid,
                        "the prompt has token id {}, but the model's vocabulary has {} tokens; the "
                        "tokenizer may belong to another model",
                        token, config.vocab_size);
    }
  }
  if (request.max_tokens < 0) {
    return make_error(invalid, "max_tokens is {}, but must not be negative", request.max_tokens);
  }
  if (std::max(request.top_logprobs, request.prompt_logprobs) > kMaxTopLogprobs) {
    return make_error(invalid, "top_logprobs and prompt_logprobs are {} and {}, but at most {}",
                      request.top_logprobs, request.prompt_logprobs, kMaxTopLogprobs);
  }
  if (request.pooling != Pooling::kNone && request.max_tokens > 0) {
    return make_error(invalid, "max_tokens is {}, but a request for a pooled prompt has no answer",
                      request.max_tokens);
  }
  NIBBLE_RETURN_IF_ERROR(check_bad_words(request, config.vocab_size));
  return Sampler::check(request.sampling, config.vocab_size);
}

Result<std::unique_ptr<EngineCore>> EngineCore::create(std::unique_ptr<Model> model,
                                                       const EngineOptions& options) {
  if (options.speculation.tokens > 0 && model->samples_tokens()) {
    return make_error(StatusCode::kUnsupported,
                      "--speculative-config: this device samples tokens where it computes, and "
                      "verifies none that are proposed; leave it out, or use --device cpu");
  }
  const KvCacheShape shape = cache_shape(options, model->config());
  NIBBLE_ASSIGN_OR_RETURN(PagedKvCache cache, model->make_cache(shape));
  if (cache.num_pools() > 1) {
    NIBBLE_LOG(kInfo, "KV cache: {}", shape.describe());
  }
  NIBBLE_ASSIGN_OR_RETURN(
      ModelRunner runner,
      ModelRunner::create(*model, std::move(cache), limits_of(options, model->config())));
  return std::unique_ptr<EngineCore>(new EngineCore(std::move(model), options, std::move(runner)));
}

EngineCore::EngineCore(std::unique_ptr<Model> model,
                       const EngineOptions& options,
                       ModelRunner runner)
    : model_(std::move(model)),
      options_(options),
      runner_(std::move(runner)),
      sampler_(model_->config().vocab_size),
      masks_(model_->config().vocab_size) {
  std::random_device device;
  unseeded_ = options_.seed.value_or((uint64_t{device()} << 32) | device());
  plan_.reserve(static_cast<size_t>(options_.max_num_seqs));
  if (options_.warm_up && model_->first_steps_are_slow()) {
    warm_up();
  }
  reset_pages();
}

// Steps of the lengths that prompts have, as far as the pages of every pool hold them.
void EngineCore::warm_up() {
  CHECK(model_->samples_tokens());
  const int64_t pages = std::ranges::min(options_.pool_pages);
  const int64_t most = std::min(
      {options_.max_num_batched_tokens, options_.max_model_len, pages * options_.page_size});
  for (const int64_t length : kWarmUpLengths) {
    if (length <= most) {
      runner_.warm_up(length);
    }
  }
  experts_before_ = model_->expert_counts();
}

void EngineCore::reset_pages() {
  if (scheduler_) {
    past_preemptions_ += scheduler_->preemptions();
  }
  scheduler_.reset();
  pages_.reset();
  std::vector<PrefixCache::PoolSize> sizes;
  const std::vector<KvPool> pools = kv_pools(kv_specs(model_->config(), options_.kv_code));
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    sizes.push_back({.num_pages = options_.pool_pages[pool], .window = pools[pool].spec.window});
  }
  pages_ = std::make_unique<PrefixCache>(sizes, options_.prefix_caching ? options_.page_size : 0);
  scheduler_ = std::make_unique<Scheduler>(limits_of(options_, model_->config()), *pages_);
}

void EngineCore::add(Request request) {
  auto sequence = std::make_unique<Sequence>();
  sequence->arrival = next_arrival_++;
  sequence->seed = request.sampling.seed.value_or(
      unseeded_ + 0x9e3779b97f4a7c15ULL * static_cast<uint64_t>(next_arrival_));
  sequence->tokens = std::move(request.prompt);
  std::ranges::transform(request.cache_salt, std::back_inserter(sequence->salt),
                         [](char c) { return static_cast<unsigned char>(c); });
  sequence->prompt_tokens = sequence->length();
  if (Sampler::needs_seen(request.sampling)) {
    for (const int32_t token : sequence->tokens) {
      sequence->seen.emplace(token, 0);
    }
  }
  sequence->request = std::move(request);
  ++never_admitted_;
  scheduler_->add(std::move(sequence));
}

bool EngineCore::step() {
  if (!ahead_ && !plan_step()) {
    return false;
  }
  ahead_ = false;
  if (may_run_ahead()) {
    run_ahead();
  }
  if (sampled_) {
    runner_.finish();
  }
  ++counters_.steps;
  for (size_t i = 0; i < plan_.size(); ++i) {
    const ScheduledSequence item = plan_[i];
    if (item.sequence != nullptr) {  // else it ended in the step before
      handle_result(i, item);
    }
  }
  if (!ahead_) {
    plan_.clear();
  }
  return true;
}

// Plans and runs or starts a step. False when there is nothing to do.
bool EngineCore::plan_step() {
  plan_.clear();
  const auto cancelled = scheduler_->remove_if(
      [](const Sequence& s) { return s.request.cancelled->load(std::memory_order_relaxed); });
  for (const auto& sequence : cancelled) {
    never_admitted_ -= sequence->counted ? 0 : 1;
    report_end(*sequence, FinishReason::kCancelled, {});
  }
  const auto& plan = scheduler_->schedule();
  plan_.assign(plan.begin(), plan.end());
  if (plan_.empty()) {
    return false;
  }
  note_admissions();
  run_plan();
  return true;
}

// Whether the next step can be told before this one's tokens are known: the same sequences, each
// with one token more.
bool EngineCore::may_run_ahead() const {
  return sampled_ && !scheduler_->may_admit() &&
         std::ranges::all_of(plan_, [&](const ScheduledSequence& item) {
           if (item.sequence == nullptr) {
             return false;
           }
           const Sequence& sequence = *item.sequence;
           const Request& request = sequence.request;
           return item.num_tokens == 1 && sequence.remaining() == 1 &&
                  sequence.generated() + 1 < request.max_tokens &&
                  sequence.length() + 1 < options_.max_model_len &&
                  !Sampler::needs_seen(request.sampling) && !watches_answer(request) &&
                  request.constraint == nullptr &&
                  !request.cancelled->load(std::memory_order_relaxed);
         });
}

void EngineCore::run_ahead() {
  sampling_.clear();
  for (const ScheduledSequence& item : plan_) {
    sampling_.add(sampler_input(*item.sequence, 1));
  }
  if (sampling_.fits() && scheduler_->extend(plan_)) {
    runner_.start(plan_, sampling_.input(), true);
    ahead_ = true;
  }
}

// Counts prompts when their sequence is computed for the first time.
void EngineCore::note_admissions() {
  for (const ScheduledSequence& item : plan_) {
    Sequence* const sequence = item.sequence;
    if (sequence->counted) {
      continue;
    }
    sequence->counted = true;
    sequence->queue_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - sequence->request.made)
            .count();
    --never_admitted_;
    counters_.prompt_tokens += sequence->prompt_tokens;
    counters_.cached_tokens += sequence->cached_tokens;
  }
}

// Computes the plan, or starts it where the model samples tokens.
void EngineCore::run_plan() {
  // What scores or pools prompts is read on the host, and so is all of its step.
  sampled_ = model_->samples_tokens() && std::ranges::none_of(plan_, [](const auto& item) {
               return item.sequence->prompt_rows(item.num_tokens).count > 0 ||
                      item.sequence->pooled_rows(item.num_tokens).count > 0;
             });
  masks_.start(plan_);
  if (sampled_) {
    masks_.wait();
    sampling_.clear();
    for (const ScheduledSequence& item : plan_) {
      const Sequence& sequence = *item.sequence;
      if (sequence.computed + item.num_tokens == sequence.length() && sequence.wants_token()) {
        sampling_.add(sampler_input(sequence, 0));
      }
    }
    sampled_ = sampling_.fits();
  }
  if (sampled_) {
    runner_.start(plan_, sampling_.input(), false);
  } else {
    runner_.run(plan_);
    masks_.wait();
  }
}

// For the sequence's next token, or the one `ahead` tokens later.
SamplerInput EngineCore::sampler_input(const Sequence& sequence, int64_t ahead) {
  const Request& request = sequence.request;
  const int64_t step = sequence.generated() + ahead;
  banned_.clear();
  if (step < request.min_tokens) {
    for (int32_t token : request.stop_tokens) {
      banned_.push_back(token);
    }
    for (const int64_t token : model_->config().eos_token_ids) {
      banned_.push_back(static_cast<int32_t>(token));
    }
    const int64_t vocab = model_->config().vocab_size;
    std::erase_if(banned_, [&](int32_t t) { return t < 0 || t >= vocab; });
  }
  add_bad_words(sequence, banned_);
  return {.params = request.sampling,
          .seed = sequence.seed,
          .step = step,
          .seen = sequence.seen,
          .banned = banned_,
          .mask = sequence.mask,
          .top_logprobs = request.top_logprobs};
}

// Scores what the step computed of a prompt that is to be scored.
Status EngineCore::score_prompt(size_t index, Sequence& sequence) {
  std::span<const float> rows = runner_.prompt_logits(index);
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  for (; !rows.empty(); rows = rows.subspan(vocab)) {
    const int32_t token = sequence.tokens[static_cast<size_t>(++sequence.scored)];
    NIBBLE_ASSIGN_OR_RETURN(ScoredToken scored, sampler_.score(rows.first(vocab), token,
                                                               sequence.request.prompt_logprobs));
    sequence.prompt_scores.push_back(std::move(scored));
  }
  return {};
}

// Adds final hidden states of what the step computed to those that are to be pooled.
Status EngineCore::pool_prompt(size_t index, const ScheduledSequence& item) {
  Sequence& sequence = *item.sequence;
  const Sequence::PromptRows rows = sequence.pooled_rows(item.num_tokens);
  if (rows.count == 0) {
    return {};
  }
  states_.resize(static_cast<size_t>(rows.count * model_->config().hidden_size));
  runner_.final_states(index, rows.begin - sequence.computed, states_);
  sequence.pooled_tokens = rows.begin + rows.count;
  return add_states(states_, static_cast<size_t>(model_->config().hidden_size), sequence.pooled);
}

// What the step computed of a prompt that is to be scored or pooled.
Status EngineCore::read_prompt(size_t index, const ScheduledSequence& item) {
  if (sampled_) {
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(score_prompt(index, *item.sequence));
  return pool_prompt(index, item);
}

// Empty when the step ends inside the prompt, or no token is wanted.
std::optional<Result<SampledToken>> EngineCore::sample(size_t index, const Sequence& sequence) {
  if (sampled_) {
    const SampledRow* row = runner_.sampled(index);
    if (row == nullptr) {
      return std::nullopt;
    }
    return SamplingBuilder::result(*row, sequence.request.top_logprobs);
  }
  const std::span<float> logits = runner_.logits(index);
  if (logits.empty()) {
    return std::nullopt;
  }
  return sampler_.sample(logits, sampler_input(sequence, 0));
}

void EngineCore::handle_result(size_t index, const ScheduledSequence& item) {
  Sequence& sequence = *item.sequence;
  const Status read = read_prompt(index, item);
  auto sampled = read.ok() ? sample(index, sequence) : Result<SampledToken>(read);
  if (sampled && !sampled->ok()) {
    fail(sequence, sampled->status());
    return;
  }
  scheduler_->commit(sequence, item.num_tokens);
  if (!sampled) {
    if (sequence.remaining() == 0) {
      finish(sequence, FinishReason::kLength, {});
    }
    return;
  }
  if (accept_token(sequence, std::move(*sampled).value()) && verify_draft(index, item)) {
    propose(sequence);
  }
}

// Goes on as long as what was sampled is what was proposed: then the next row of logits is that of
// the token sampled last. Every token is sampled as if it had a step of its own, so that the answer
// is the same. False when it ends the answer.
bool EngineCore::verify_draft(size_t index, const ScheduledSequence& item) {
  Sequence& sequence = *item.sequence;
  int64_t accepted = 0;
  bool running = true;
  while (running && accepted < item.num_draft &&
         sequence.tokens.back() == sequence.draft[static_cast<size_t>(accepted)]) {
    auto sampled = sampler_.sample(runner_.logits(index, ++accepted), sampler_input(sequence, 0));
    if (sampled.ok()) {
      scheduler_->commit(sequence, 1);
      running = accept_token(sequence, std::move(sampled).value());
    } else {
      fail(sequence, sampled.status());
      running = false;
    }
  }
  if (item.num_draft > 0) {
    counters_.speculation.count(item.num_draft, accepted);
  }
  if (running && item.num_draft > 0) {
    sequence.draft_length.learn(options_.speculation, item.num_draft, accepted);
  }
  return running;
}

void EngineCore::propose(Sequence& sequence) const {
  sequence.draft.clear();
  // A constraint's masks are known for the next token alone.
  if (options_.speculation.tokens == 0 || sequence.request.constraint != nullptr) {
    return;
  }
  const int64_t most = std::min({sequence.draft_length.next(options_.speculation),
                                 sequence.request.max_tokens - sequence.generated() - 1,
                                 options_.max_model_len - sequence.length() - 1});
  if (most > 0) {
    sequence.draft = look_up(sequence.tokens, options_.speculation, most);
  }
}

void EngineCore::fail(Sequence& sequence, const Status& failure) {
  pages_->clear();  // its keys and values may be damaged too: nobody else shall get them
  finish(sequence, FinishReason::kError, explain(failure));
}

// Everybody waits while the weights are looked through, but once only, and a model with such logits
// has little to give them.
Status EngineCore::explain(const Status& failure) {
  if (failure.code() != StatusCode::kCorrupt) {
    return failure;
  }
  if (!not_finite_) {
    not_finite_ = explain_not_finite(*model_);
  }
  return *not_finite_;
}

// Appends and reports a token. False when it ends the answer: then the sequence is gone.
bool EngineCore::accept_token(Sequence& sequence, SampledToken sampled) {
  const Request& request = sequence.request;
  if (request.constraint != nullptr) {
    const Status taken = request.constraint->accept(sampled.token);
    if (!taken.ok()) {
      finish(sequence, FinishReason::kError, taken);
      return false;
    }
  }
  sequence.tokens.push_back(sampled.token);
  if (Sampler::needs_seen(request.sampling)) {
    ++sequence.seen[sampled.token];
  }
  ++counters_.generated_tokens;
  TokenEvent event{.token = sampled.token,
                   .logprob = sampled.logprob,
                   .top_logprobs = std::move(sampled.top_logprobs),
                   .prompt_logprobs = std::move(sequence.prompt_scores),
                   .prompt_tokens = sequence.prompt_tokens,
                   .cached_tokens = sequence.cached_tokens,
                   .queue_seconds = sequence.queue_seconds};
  if (ends_answer(sequence, sampled.token)) {
    event.finish = FinishReason::kStop;
  } else if (sequence.generated() >= request.max_tokens ||
             sequence.length() >= options_.max_model_len) {
    event.finish = FinishReason::kLength;
  }
  if (event.finish == FinishReason::kNone) {
    request.on_event(std::move(event));
    return true;
  }
  const auto owned = take_out(sequence);
  owned->request.on_event(std::move(event));
  return false;
}

bool EngineCore::ends_answer(const Sequence& sequence, int32_t token) const {
  const Request& request = sequence.request;
  const auto& ends = model_->config().eos_token_ids;
  return std::ranges::find(request.stop_tokens, token) != request.stop_tokens.end() ||
         (!request.ignore_eos && std::ranges::find(ends, token) != ends.end());
}

// Takes a sequence of the plan out of it and of the scheduler.
std::unique_ptr<Sequence> EngineCore::take_out(Sequence& sequence) {
  for (ScheduledSequence& item : plan_) {
    item.sequence = item.sequence == &sequence ? nullptr : item.sequence;
  }
  return scheduler_->remove(sequence);
}

void EngineCore::finish(Sequence& sequence, FinishReason reason, const Status& failure) {
  const auto owned = take_out(sequence);
  report_end(*owned, reason, failure);
}

void EngineCore::report_end(Sequence& sequence, FinishReason reason, const Status& failure) {
  sequence.request.on_event({.prompt_logprobs = std::move(sequence.prompt_scores),
                             .pooled = pooled_prompt(sequence),
                             .finish = reason,
                             .failure = failure,
                             .prompt_tokens = sequence.prompt_tokens,
                             .cached_tokens = sequence.cached_tokens,
                             .queue_seconds = sequence.queue_seconds});
}

void EngineCore::abandon(const std::string& batch_reason, const std::string& other_reason) {
  masks_.wait();  // the step may have failed while they were being filled
  // Sequences that finished in this step are gone; compare addresses only.
  std::vector<const Sequence*> batch;
  for (const auto& item : plan_) {
    batch.push_back(item.sequence);
  }
  plan_.clear();
  ahead_ = false;
  const auto all = scheduler_->take_all();
  reset_pages();
  never_admitted_ = 0;
  for (const auto& sequence : all) {
    const bool in_batch = std::ranges::find(batch, sequence.get()) != batch.end();
    report_end(*sequence, FinishReason::kError,
               Status(StatusCode::kUnavailable, in_batch ? batch_reason : other_reason));
  }
}

void EngineCore::cancel_all() {
  for (ScheduledSequence& item : plan_) {
    item.sequence = nullptr;  // of a step that has been started ahead: for nobody now
  }
  const auto all = scheduler_->remove_if([](const Sequence&) { return true; });
  never_admitted_ = 0;
  for (const auto& sequence : all) {
    report_end(*sequence, FinishReason::kCancelled, {});
  }
}

EngineStats EngineCore::stats() const {
  EngineStats out = counters_;
  out.running = scheduler_->running();
  out.waiting = scheduler_->waiting();
  for (int64_t index = 0; index < pages_->num_pools(); ++index) {
    const PagePool& pool = pages_->pool(index);
    const int64_t total = pool.allocator().num_pages();
    const int64_t used = total - pool.available_pages();
    out.pools.push_back({.window = pool.window(), .pages_total = total, .pages_used = used});
    out.pages_total += total;
    out.pages_used += used;
  }
  out.preemptions = past_preemptions_ + scheduler_->preemptions();
  return out;
}

}  // namespace nibble
