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
// Those that steps with proposals are recorded for on GPUs: a step that is recorded takes long, and
// would be taken for one that does not pay.
constexpr int64_t kWarmUpRows[] = {2, 4, 8, 16, 24, 32, 40, 48, 56, 64};

int64_t speculated_rows(const Model& model) {
  return model.samples_tokens() ? kMostSpeculatedRows : kSpeculatedRows;
}

SchedulerLimits core_limits(const EngineOptions& options, const Model& model) {
  SchedulerLimits limits = limits_of(options, model.config());
  limits.max_speculated_rows = speculated_rows(model);
  return limits;
}

bool stands_in(std::span<const int32_t> tokens, int32_t token) {
  return std::ranges::find(tokens, token) != tokens.end();
}

}  // namespace

Result<std::unique_ptr<EngineCore>> EngineCore::create(std::unique_ptr<Model> model,
                                                       const EngineOptions& options,
                                                       std::unique_ptr<Model> draft) {
  const KvCacheShape shape = cache_shape(options, model->config());
  NIBBLE_ASSIGN_OR_RETURN(PagedKvCache cache, model->make_cache(shape));
  if (cache.num_pools() > 1) {
    NIBBLE_LOG(kInfo, "KV cache: {}", shape.describe());
  }
  NIBBLE_ASSIGN_OR_RETURN(ModelRunner runner, ModelRunner::create(*model, std::move(cache),
                                                                  core_limits(options, *model)));
  std::unique_ptr<DraftModel> proposer;
  if (draft != nullptr) {
    NIBBLE_ASSIGN_OR_RETURN(proposer, DraftModel::create(std::move(draft), options));
  }
  auto core =
      std::unique_ptr<EngineCore>(new EngineCore(std::move(model), options, std::move(runner)));
  core->speculator_ = std::make_unique<Speculator>(options, speculated_rows(*core->model_),
                                                   std::move(proposer), core->inputs_);
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
  for (const int64_t rows : kWarmUpRows) {
    if (options_.speculation.tokens > 0 && rows <= std::min(most, options_.max_prompt_rows)) {
      runner_.warm_up_proposals(rows);
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
  scheduler_ = std::make_unique<Scheduler>(core_limits(options_, *model_), *pages_);
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
  if (late_) {
    sample_late();
  }
  // What is proposed must be known before a step is started.
  const bool proposes = speculator_->decide(
      plan_, scheduler_->may_admit() ? Speculator::Others::kWaiting : Speculator::Others::kNone);
  if (!proposes && may_run_ahead()) {
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
  events_.deliver();
  speculator_->note_step(plan_, std::chrono::duration<double>(Clock::now() - start).count());
  speculator_->propose(plan_);
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
  events_.deliver();
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
           return item.num_tokens == 1 && item.num_draft == 0 && sequence.remaining() == 1 &&
                  sequence.generated() + 1 < request.max_tokens &&
                  sequence.length() + 1 < options_.max_model_len &&
                  !Sampler::needs_seen(request.sampling) && !watches_answer(request) &&
                  sequence.mask_job == nullptr;
         });
}

void EngineCore::run_ahead() {
  sampling_.clear();
  row_owners_.clear();
  for (const ScheduledSequence& item : plan_) {
    row_owners_.push_back(row_owners_.size());
    sampling_.add(inputs_.next(*item.sequence, 1));
  }
  if (sampling_.fits() && scheduler_->extend(plan_)) {
    start(Ahead::kOfItsTokens);
    ahead_ = true;
  }
}

// Starts the plan on a model that samples tokens. What is constrained is sampled later: its masks
// are filled while the model computes.
void EngineCore::start(Ahead ahead) {
  late_ = std::ranges::any_of(row_owners_, [&](size_t index) {
    return plan_[index].sequence->request.constraint != nullptr;
  });
  runner_.start(plan_, late_ ? SamplingInput{} : sampling_.input(), ahead == Ahead::kOfItsTokens);
}

void EngineCore::sample_late() {
  late_ = false;
  masks_.start(plan_);
  masks_.wait(plan_);
  sampling_.clear_masks();
  for (const size_t index : row_owners_) {
    const Sequence* const sequence = plan_[index].sequence;  // null: it ended in the step before
    const bool masked = sequence != nullptr && sequence->mask_job == nullptr;
    sampling_.add_mask(masked ? std::span<const uint32_t>(sequence->mask)
                              : std::span<const uint32_t>());
  }
  runner_.sample(sampling_.input());
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
  if (sampled_) {
    sampling_.clear();
    row_owners_.clear();
    for (size_t i = 0; i < plan_.size(); ++i) {
      const ScheduledSequence& item = plan_[i];
      Sequence& sequence = *item.sequence;
      if (sequence.computed + item.num_tokens == sequence.length() && sequence.wants_token()) {
        row_owners_.insert(row_owners_.end(), static_cast<size_t>(1 + item.num_draft), i);
        add_rows(sequence, item.num_draft);
      }
    }
    sampled_ = sampling_.fits();
  }
  if (sampled_) {
    start(Ahead::kNo);
  } else {
    masks_.start(plan_);
    runner_.run(plan_);
    masks_.wait(plan_);
  }
}

// What the rows of a sequence are sampled by, each as if what is proposed in front of it were
// right: else nobody looks at it.
void EngineCore::add_rows(Sequence& sequence, int64_t num_draft) {
  const bool counts = Sampler::needs_seen(sequence.request.sampling);
  const auto draft = std::span(sequence.draft).first(static_cast<size_t>(num_draft));
  sampling_.add(inputs_.next(sequence, 0));
  for (const int32_t token : draft) {
    sequence.tokens.push_back(token);
    if (counts) {
      ++sequence.seen[token];
    }
    sampling_.add(inputs_.next(sequence, 0));
  }
  sequence.tokens.resize(sequence.tokens.size() - draft.size());
  for (const int32_t token : draft) {
    if (counts && --sequence.seen[token] == 0 && !stands_in(sequence.tokens, token)) {
      sequence.seen.erase(token);
    }
  }
}

void EngineCore::abandon(const std::string& batch_reason, const std::string& other_reason) {
  // Sequences that finished in this step are gone; compare addresses only.
  std::vector<const Sequence*> batch;
  for (const auto& item : plan_) {
    batch.push_back(item.sequence);
  }
  plan_.clear();
  ahead_ = late_ = false;
  const auto all = scheduler_->take_all();
  reset_pages();
  never_admitted_.clear();
  for (const auto& sequence : all) {
    const bool in_batch = std::ranges::find(batch, sequence.get()) != batch.end();
    report_end(*sequence, FinishReason::kError,
               Status(StatusCode::kUnavailable, in_batch ? batch_reason : other_reason));
  }
  events_.deliver();
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
  events_.deliver();
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
