#include "engine/model_runner.h"

#include "base/check.h"

namespace nibble {

Result<ModelRunner> ModelRunner::create(Model& model,
                                        PagedKvCache cache,
                                        const SchedulerLimits& limits) {
  ModelRunner runner(model, std::move(cache));
  const auto seqs = static_cast<size_t>(limits.max_num_seqs);
  const auto vocab = static_cast<size_t>(model.config().vocab_size);
  NIBBLE_ASSIGN_OR_RETURN(runner.logits_, Buffer::allocate(seqs * vocab * sizeof(float)));
  runner.tokens_.reserve(static_cast<size_t>(limits.max_num_batched_tokens));
  runner.spans_.reserve(seqs);
  runner.logit_rows_.reserve(seqs);
  runner.logits_of_.reserve(seqs);
  return runner;
}

ForwardBatch ModelRunner::batch_of(std::span<const ScheduledSequence> plan) {
  tokens_.clear();
  spans_.clear();
  logit_rows_.clear();
  logits_of_.clear();
  for (const auto& [sequence, num_tokens] : plan) {
    const auto begin = static_cast<int32_t>(tokens_.size());
    const auto first = sequence->tokens.begin() + sequence->computed;
    tokens_.insert(tokens_.end(), first, first + num_tokens);
    const int64_t kv_len = sequence->computed + num_tokens;
    CHECK_LE(kv_len, sequence->length());
    spans_.push_back({.q_begin = begin,
                      .q_len = static_cast<int32_t>(num_tokens),
                      .kv_len = static_cast<int32_t>(kv_len),
                      .pages = sequence->pages.data()});
    if (kv_len == sequence->length()) {
      logits_of_.push_back(static_cast<int32_t>(logit_rows_.size()));
      logit_rows_.push_back(static_cast<int32_t>(tokens_.size()) - 1);
    } else {
      logits_of_.push_back(-1);
    }
  }
  return {.tokens = tokens_, .sequences = spans_, .logit_rows = logit_rows_};
}

void ModelRunner::run(std::span<const ScheduledSequence> plan) {
  const ForwardBatch batch = batch_of(plan);
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  model_->forward(batch, cache_, logits_.as<float>().first(logit_rows_.size() * vocab));
}

void ModelRunner::run_and_pick(std::span<const ScheduledSequence> plan, const PickInput& picks) {
  const ForwardBatch batch = batch_of(plan);
  picked_.resize(logit_rows_.size());
  model_->forward_and_pick(batch, cache_, picks, picked_);
}

const PickedRow* ModelRunner::picked(size_t index) const {
  CHECK_LT(index, logits_of_.size());
  const int32_t row = logits_of_[index];
  return row < 0 ? nullptr : &picked_[static_cast<size_t>(row)];
}

std::span<float> ModelRunner::logits(size_t index) {
  CHECK_LT(index, logits_of_.size());
  if (logits_of_[index] < 0) {
    return {};
  }
  const auto vocab = static_cast<size_t>(model_->config().vocab_size);
  return logits_.as<float>().subspan(static_cast<size_t>(logits_of_[index]) * vocab, vocab);
}

}  // namespace nibble
