#include "engine/engine_core.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "arch/kv_specs.h"
#include "base/check.h"
#include "base/log.h"
#include "engine/bad_words.h"
#include "engine/engine_limits.h"

namespace nibble {
namespace {

// One or more for each size of tiles that products and attention have.
constexpr int64_t kWarmUpLengths[] = {1, 16, 32, 64, 128, 256, 512, 1024, 2048};

}  // namespace

Result<std::unique_ptr<EngineCore>> EngineCore::create(std::unique_ptr<Model> model,
                                                       const EngineOptions& options,
                                                       std::unique_ptr<Model> draft) {
  if (options.speculation.tokens > 0 && model->samples_tokens()) {
    return no_speculation();
  }
  const KvCacheShape shape = cache_shape(options, model->config());
  NIBBLE_ASSIGN_OR_RETURN(PagedKvCache cache, model->make_cache(shape));
  if (cache.num_pools() > 1) {
    NIBBLE_LOG(kInfo, "KV cache: {}", shape.describe());
  }
  NIBBLE_ASSIGN_OR_RETURN(
      ModelRunner runner,
      ModelRunner::create(*model, std::move(cache), limits_of(options, model->config())));
  std::unique_ptr<DraftModel> proposer;
  if (draft != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(proposer, DraftModel::create(std::move(draft), options));
  }
  auto core =
      std::unique_ptr<EngineCore>(new EngineCore(std::move(model), options, std::move(runner)));
  core->speculator_ = std::make_unique<Speculator>(options, std::move(proposer), core->inputs_);
  return core;
}

EngineCore::EngineCore(std::unique_ptr<Model> model,
                       const EngineOptions& options,
                       ModelRunner runner)
    : model_(std::move(model)),
      options_(options),
      runner_(std::move(runner)),
      sampler_(model_->config().vocab_size),
      masks_(model_->config().vocab_size),
      inputs_(model_->config()) {
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
  ++never_admitted_[sequence->request.client];
  scheduler_->add(std::move(sequence));
}

bool EngineCore::step() {
  const Clock::time_point start = Clock::now();
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
  if (!sampled_) {
    speculator_->note_step(plan_, std::chrono::duration<double>(Clock::now() - start).count());
    speculator_->propose(
        plan_, scheduler_->may_admit() ? Speculator::Others::kWaiting : Speculator::Others::kNone);
  }
  if (!ahead_) {
    plan_.clear();
  }
  return true;
}

namespace {

bool is_cancelled(const Sequence& sequence) {
  return sequence.request.cancelled->load(std::memory_order_relaxed);
}

bool is_over(const Sequence& sequence, std::chrono::steady_clock::time_point now) {
  return is_cancelled(sequence) || now >= sequence.request.deadline;
}

Status no_token_in_time(const Sequence& sequence) {
  const Request& request = sequence.request;
  const std::chrono::duration<double> limit = request.deadline - request.made;
  return make_error(StatusCode::kUnavailable,
                    "the time limit of {:.3g} s ended before the first token: the request {}; ask "
                    "again later, or with a longer timeout",
                    limit.count(),
                    sequence.admitted ? "was still being read" : "still waited for others");
}

}  // namespace

// Takes out those that are cancelled or past their deadline.
void EngineCore::end_requests() {
  const auto ended = scheduler_->remove_if(
      [now = Clock::now()](const Sequence& sequence) { return is_over(sequence, now); });
  for (const auto& sequence : ended) {
    never_admitted_[sequence->request.client] -= sequence->counted ? 0 : 1;
    if (is_cancelled(*sequence)) {
      report_end(*sequence, FinishReason::kCancelled, {});
    } else {
      report_end(*sequence, FinishReason::kTimeout,
                 sequence->generated() > 0 ? Status() : no_token_in_time(*sequence));
    }
  }
}

// Plans and runs or starts a step. False when there is nothing to do.
bool EngineCore::plan_step() {
  plan_.clear();
  end_requests();
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
         !scheduler_->any_of(
             [now = Clock::now()](const Sequence& sequence) { return is_over(sequence, now); }) &&
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
                  request.constraint == nullptr;
         });
}

void EngineCore::run_ahead() {
  sampling_.clear();
  for (const ScheduledSequence& item : plan_) {
    sampling_.add(inputs_.next(*item.sequence, 1));
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
        std::chrono::duration<double>(Clock::now() - sequence->request.made).count();
    --never_admitted_[sequence->request.client];
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
        sampling_.add(inputs_.next(sequence, 0));
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
  never_admitted_.clear();
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
  never_admitted_.clear();
  for (const auto& sequence : all) {
    report_end(*sequence, FinishReason::kCancelled, {});
  }
}

EngineStats EngineCore::stats() const {
  EngineStats out = counters_;
  out.speculation = speculator_->stats();
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
