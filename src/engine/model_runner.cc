#include "engine/model_runner.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/math.h"

namespace nibble {

Result<ModelRunner> ModelRunner::create(Model& model,
                                        PagedKvCache cache,
                                        const SchedulerLimits& limits) {
  ModelRunner runner(model, std::move(cache));
  const auto seqs = static_cast<size_t>(limits.max_num_seqs);
  const auto vocab = static_cast<size_t>(model.config().vocab_size);
  const size_t rows = seqs + static_cast<size_t>(limits.max_prompt_rows);
  NIBBLE_ASSIGN_OR_RETURN(runner.logits_, Buffer::allocate(rows * vocab * sizeof(float)));
  runner.tokens_.reserve(static_cast<size_t>(limits.max_num_batched_tokens));
  const size_t spans = std::max(seqs, static_cast<size_t>(limits.max_speculated_rows));
  runner.spans_.reserve(spans);
  runner.other_pools_.reserve(spans * static_cast<size_t>(runner.cache_.num_pools() - 1));
  runner.logit_rows_.reserve(rows);
  runner.prompt_rows_.reserve(seqs);
  runner.first_rows_.reserve(seqs);
  runner.logits_of_.reserve(seqs);
  return runner;
}

StepInput ModelRunner::batch_of(std::span<const ScheduledSequence> plan, bool ahead) {
  tokens_.clear();
  spans_.clear();
  other_pools_.clear();
  logit_rows_.clear();
  prompt_rows_.clear();
  first_rows_.clear();
  logits_of_.clear();
  for (const auto& [sequence, num_tokens, num_draft] : plan) {
    const auto begin = static_cast<int32_t>(tokens_.size());
    const int64_t length = sequence->length() + (ahead ? 1 : 0);
    const int64_t kv_len = sequence->computed + num_tokens + (ahead ? 1 : 0);
    CHECK_LE(kv_len, length);
    if (ahead) {
      CHECK_EQ(num_tokens, 1);
      tokens_.push_back(0);
    } else {
      const auto first = sequence->tokens.begin() + sequence->computed;
      tokens_.insert(tokens_.end(), first, first + num_tokens);
      tokens_.insert(tokens_.end(), sequence->draft.begin(), sequence->draft.begin() + num_draft);
    }
    first_rows_.push_back(begin);
    add_spans({.q_begin = begin,
               .q_len = static_cast<int32_t>(num_tokens + num_draft),
               .kv_len = static_cast<int32_t>(kv_len + num_draft),
               .pages = sequence->lists[0].pages.data(),
               .prompt_len = static_cast<int32_t>(sequence->prompt_tokens)},
              num_draft);
    const Sequence::PromptRows rows = sequence->prompt_rows(num_tokens);
    prompt_rows_.push_back({logit_rows_.size(), static_cast<size_t>(rows.count)});
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t row = begin + rows.begin - sequence->computed + i;
      logit_rows_.push_back(static_cast<int32_t>(row));
    }
    if (kv_len == length && sequence->wants_token()) {
      logits_of_.push_back(static_cast<int32_t>(logit_rows_.size()));
      const auto last = static_cast<int32_t>(begin + num_tokens - 1);
      for (int32_t row = last; row <= last + num_draft; ++row) {
        logit_rows_.push_back(row);
      }
    } else {
      logits_of_.push_back(-1);
    }
  }
  add_other_pools(plan);
  return {.tokens = tokens_,
          .sequences = spans_,
          .logit_rows = logit_rows_,
          .fed = ahead,
          .other_pools = other_pools_};
}

// Where the model samples tokens, rows behind one another are spans of one row each, as those of
// sequences that decode: kernels for few rows of many sequences take all of a step, and records of
// such steps serve it.
void ModelRunner::add_spans(SequenceSpan whole, int64_t num_draft) {
  if (num_draft == 0 || !model_->samples_tokens()) {
    spans_.push_back(whole);
    return;
  }
  for (int32_t row = 0; row < whole.q_len; ++row) {
    SequenceSpan span = whole;
    span.q_begin += row;
    span.q_len = 1;
    span.kv_len -= whole.q_len - 1 - row;
    spans_.push_back(span);
  }
}

// The same spans with the pages of each further pool.
void ModelRunner::add_other_pools(std::span<const ScheduledSequence> plan) {
  for (int64_t pool = 1; pool < cache_.num_pools(); ++pool) {
    size_t span = 0;
    for (const ScheduledSequence& item : plan) {
      const auto& pages = item.sequence->lists[static_cast<size_t>(pool)].pages;
      const int32_t* const first = spans_[span].pages;
      for (; span < spans_.size() && spans_[span].pages == first; ++span) {
        other_pools_.push_back(spans_[span]);
        other_pools_.back().pages = pages.data();
      }
    }
  }
}

void ModelRunner::warm_up(int64_t num_tokens) {
  const auto count = static_cast<int32_t>(num_tokens);
  std::vector<int32_t> pages(static_cast<size_t>(ceil_div(num_tokens, cache_.shape().page_size)));
  std::iota(pages.begin(), pages.end(), 0);
  tokens_.assign(static_cast<size_t>(num_tokens), 0);
  spans_.assign(
      1,
      {.q_begin = 0, .q_len = count, .kv_len = count, .pages = pages.data(), .prompt_len = count});
  other_pools_.assign(static_cast<size_t>(cache_.num_pools() - 1), spans_.front());
  logit_rows_.assign(1, count - 1);
  const RowSampling greedy;
  const StepInput input{.tokens = tokens_,
                        .sequences = spans_,
                        .logit_rows = logit_rows_,
                        .other_pools = other_pools_,
                        .warm_up = true};
  model_->start(input, cache_, {.rows = {&greedy, 1}});
  SampledRow sampled;
  model_->finish({&sampled, 1});
}

void ModelRunner::warm_up_proposals(int64_t rows) {
  std::vector<int32_t> pages(static_cast<size_t>(ceil_div(rows, cache_.shape().page_size)));
  std::iota(pages.begin(), pages.end(), 0);
  Sequence sequence;
  sequence.tokens.assign(1, 0);
  sequence.prompt_tokens = 1;
  sequence.request.max_tokens = rows;
  sequence.lists.resize(static_cast<size_t>(cache_.num_pools()), {.pages = pages});
  sequence.draft.assign(static_cast<size_t>(rows - 1), 0);
  const ScheduledSequence item{.sequence = &sequence, .num_tokens = 1, .num_draft = rows - 1};
  for (const float inverse_temperature : {0.0F, 1.0F}) {
    const std::vector<RowSampling> by(static_cast<size_t>(rows),
                                      {.inverse_temperature = inverse_temperature});
    StepInput input = batch_of({&item, 1}, false);
    input.warm_up = true;
    start(input, {.rows = by});
    finish();
  }
}

void ModelRunner::run(std::span<const ScheduledSequence> plan) {
  const StepInput batch = batch_of(plan, false);
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  model_->forward(batch, cache_, logits_.as<float>().first(logit_rows_.size() * vocab));
}

void ModelRunner::start(std::span<const ScheduledSequence> plan,
                        const SamplingInput& sampling,
                        bool ahead) {
  start(batch_of(plan, ahead), sampling);
}

void ModelRunner::start(const StepInput& batch, const SamplingInput& sampling) {
  model_->start(batch, cache_, sampling);
  started_.push_back({logits_of_, sampling.rows.size()});
}

void ModelRunner::sample(const SamplingInput& sampling) {
  CHECK(!started_.empty() && started_.back().rows == 0);
  // A step without tokens: all that it has is the logits of the one before.
  sampled_rows_.assign(sampling.rows.size(), 0);
  model_->start({.tokens = {}, .sequences = {}, .logit_rows = sampled_rows_}, cache_, sampling);
  started_.back().rows = sampling.rows.size();
}

void ModelRunner::finish() {
  CHECK(!started_.empty());
  logits_of_ = std::move(started_.front().logits_of);
  sampled_.resize(started_.front().rows);
  started_.pop_front();
  model_->finish(sampled_);
}

const SampledRow* ModelRunner::sampled(size_t index, int64_t drafted) const {
  CHECK_LT(index, logits_of_.size());
  const int32_t row = logits_of_[index];
  return row < 0 ? nullptr : &sampled_[static_cast<size_t>(row + drafted)];
}

std::span<const float> ModelRunner::prompt_logits(size_t index) const {
  CHECK_LT(index, prompt_rows_.size());
  const RowSpan& rows = prompt_rows_[index];
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  return logits_.as<float>().subspan(rows.first * vocab, rows.count * vocab);
}

void ModelRunner::final_states(size_t index, int64_t first, std::span<float> out) const {
  CHECK_LT(index, first_rows_.size());
  model_->final_states(first_rows_[index] + first, out);
}

std::span<float> ModelRunner::logits(size_t index, int64_t drafted) {
  CHECK_LT(index, logits_of_.size());
  if (logits_of_[index] < 0) {
    return {};
  }
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  const auto row = static_cast<size_t>(logits_of_[index] + drafted);
  return logits_.as<float>().subspan(row * vocab, vocab);
}

}  // namespace nibble
