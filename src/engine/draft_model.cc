#include "engine/draft_model.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "arch/kv_specs.h"
#include "base/check.h"
#include "base/log.h"
#include "base/math.h"
#include "engine/page_shares.h"

namespace nibble {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kFewTokens = 2;  // of a sequence: its last, and a proposal that was right

int64_t most_sequences(const EngineOptions& options) {
  return std::min(options.max_num_seqs, kMostSpeculatedRows);
}

}  // namespace

DraftShadow::~DraftShadow() {
  for (size_t pool = 0; pool < sequence.lists.size(); ++pool) {
    for (const int32_t page : sequence.lists[pool].pages) {
      pages->release(static_cast<int64_t>(pool), page);
    }
  }
}

ModelOptions DraftModel::model_options(const EngineOptions& options) {
  return {.max_batch_tokens = options.max_num_batched_tokens,
          .max_logit_rows = most_sequences(options),
          .max_sequences = most_sequences(options),
          .kv_code = options.kv_code,
          .ignore_fmpq = options.ignore_fmpq};
}

Result<std::unique_ptr<DraftModel>> DraftModel::create(std::unique_ptr<Model> model,
                                                       const EngineOptions& options) {
  KvCacheShape shape{.layers = kv_specs(model->config(), options.kv_code),
                     .page_size = options.page_size};
  const int64_t useful =
      most_sequences(options) * ceil_div(options.max_model_len, options.page_size);
  const std::vector<int64_t> most(kv_pools(shape.layers).size(), useful);
  const int64_t bytes =
      options.draft_kv_bytes > 0 ? options.draft_kv_bytes : std::numeric_limits<int64_t>::max();
  NIBBLE_ASSIGN_OR_RETURN(shape.num_pages, share_pages(shape, most, bytes, nullptr));
  NIBBLE_ASSIGN_OR_RETURN(PagedKvCache cache, model->make_cache(shape));
  const SchedulerLimits limits{.max_num_seqs = most_sequences(options),
                               .max_num_batched_tokens = options.max_num_batched_tokens,
                               .max_prompt_rows = 0,
                               .page_size = options.page_size};
  NIBBLE_ASSIGN_OR_RETURN(ModelRunner runner,
                          ModelRunner::create(*model, std::move(cache), limits));
  auto out =
      std::unique_ptr<DraftModel>(new DraftModel(std::move(model), options, std::move(runner)));
  std::vector<PrefixCache::PoolSize> sizes;
  for (const int64_t pages : shape.num_pages) {
    sizes.push_back({.num_pages = pages});
  }
  out->pages_ = std::make_shared<PrefixCache>(sizes, 0);
  NIBBLE_LOG(kInfo, "draft model: {} MiB of weights are read for a token, {} MiB of cache",
             out->model_->weight_bytes() >> 20, shape.bytes() >> 20);
  return out;
}

DraftModel::DraftModel(std::unique_ptr<Model> model,
                       const EngineOptions& options,
                       ModelRunner runner)
    : model_(std::move(model)),
      options_(options),
      runner_(std::move(runner)),
      sampler_(model_->config().vocab_size) {}

// Makes a shadow's tokens those of its sequence; what differs was a wrong proposal, and is computed
// anew.
Sequence& DraftModel::follow(DraftShadow& shadow, const Sequence& sequence) {
  Sequence& out = shadow.sequence;
  const auto computed = out.tokens.begin() + out.computed;
  const auto differ =
      std::mismatch(out.tokens.begin(), computed, sequence.tokens.begin(), sequence.tokens.end());
  out.computed = std::min(differ.first - out.tokens.begin(), sequence.length() - 1);
  out.tokens = sequence.tokens;
  return out;
}

bool DraftModel::grow(Sequence& shadow, int64_t tokens) {
  for (int64_t pool = 0; pool < pages_->num_pools(); ++pool) {
    std::vector<int32_t>& pages = shadow.lists[static_cast<size_t>(pool)].pages;
    while (std::ssize(pages) * options_.page_size < tokens) {
      const auto page = pages_->acquire(pool);
      if (!page) {
        return false;
      }
      pages.push_back(*page);
    }
  }
  return true;
}

// Plans the first pass.
void DraftModel::begin(std::span<const Wish> wishes) {
  CHECK_LE(std::ssize(wishes), most_sequences(options_));
  jobs_.clear();
  plan_.clear();
  int64_t budget = options_.max_num_batched_tokens;
  for (const Wish& wish : wishes) {
    Sequence& sequence = *wish.sequence;
    const int64_t longest = sequence.length() + wish.count - 1;  // the last is not computed
    const int64_t positions = model_->config().max_position;
    if (budget == 0 || (positions > 0 && longest > positions)) {
      continue;
    }
    if (sequence.shadow == nullptr) {
      sequence.shadow = std::make_shared<DraftShadow>(pages_);
      Sequence& made = sequence.shadow->sequence;
      made.prompt_tokens = sequence.prompt_tokens;
      made.request.max_tokens = std::numeric_limits<int64_t>::max();
      made.lists.resize(static_cast<size_t>(pages_->num_pools()));
    }
    Sequence& shadow = follow(*sequence.shadow, sequence);
    if (!grow(shadow, longest)) {
      sequence.shadow.reset();
      continue;
    }
    const int64_t tokens = std::min(shadow.remaining(), budget);
    budget -= tokens;
    jobs_.push_back({wish, &shadow});
    plan_.push_back({.sequence = &shadow, .num_tokens = tokens});
  }
}

// Computes the plan; where the model samples tokens, they are there afterwards.
void DraftModel::run_pass(const InputOf& input) {
  sampling_.clear();
  for (size_t i = 0; i < jobs_.size(); ++i) {
    if (plan_[i].num_tokens == jobs_[i].shadow->remaining()) {
      const Sequence& sequence = *jobs_[i].wish.sequence;
      SamplerInput by = input(sequence, std::ssize(sequence.draft));
      by.top_logprobs = -1;
      sampling_.add(by);
    }
  }
  sampled_ = model_->samples_tokens() && sampling_.fits();
  if (sampled_) {
    runner_.start(plan_, sampling_.input(), false);
    runner_.finish();
  } else {
    runner_.run(plan_);
  }
}

// None where the rest of a sequence is read behind a later step, or its logits are not finite.
std::optional<int32_t> DraftModel::sample(size_t index, const InputOf& input) {
  if (sampled_) {
    const SampledRow* row = runner_.sampled(index);
    return row != nullptr && row->status == SampleStatus::kOk ? std::optional(row->token)
                                                              : std::nullopt;
  }
  const std::span<float> logits = runner_.logits(index);
  if (logits.empty()) {
    return std::nullopt;
  }
  const Sequence& sequence = *jobs_[index].wish.sequence;
  SamplerInput by = input(sequence, std::ssize(sequence.draft));
  by.top_logprobs = -1;
  const auto sampled = sampler_.sample(logits, by);
  return sampled.ok() ? std::optional(sampled->token) : std::nullopt;
}

// Takes the proposals of a pass, and plans the next.
void DraftModel::take_results(const InputOf& input) {
  size_t left = 0;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const std::optional<int32_t> token = sample(i, input);
    const Job job = jobs_[i];
    job.shadow->computed += plan_[i].num_tokens;
    if (!token) {
      continue;
    }
    std::vector<int32_t>& draft = job.wish.sequence->draft;
    draft.push_back(*token);
    if (std::ssize(draft) < job.wish.count) {
      job.shadow->tokens.push_back(*token);
      jobs_[left] = job;
      plan_[left] = {.sequence = job.shadow, .num_tokens = 1};
      ++left;
    }
  }
  jobs_.resize(left);
  plan_.resize(left);
}

DraftModel::Work DraftModel::propose(std::span<const Wish> wishes, const InputOf& input) {
  Work work;
  begin(wishes);
  while (!plan_.empty()) {
    const bool few = std::ranges::all_of(
        plan_, [](const ScheduledSequence& item) { return item.num_tokens <= kFewTokens; });
    const Clock::time_point start = Clock::now();
    run_pass(input);
    take_results(input);
    if (few) {
      ++work.passes;
      work.seconds += std::chrono::duration<double>(Clock::now() - start).count();
    }
  }
  return work;
}

}  // namespace nibble
