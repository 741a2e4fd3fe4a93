#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/engine_core.h"
#include "engine/pooled_states.h"
#include "model/not_finite.h"

// What becomes of a step's logits: tokens, scores and the ends of answers.

namespace nibble {

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
std::optional<Result<SampledToken>> EngineCore::sample(size_t index,
                                                       const Sequence& sequence,
                                                       int64_t drafted) {
  if (sampled_) {
    const SampledRow* row = runner_.sampled(index, drafted);
    if (row == nullptr) {
      return std::nullopt;
    }
    return SamplingBuilder::result(*row, sequence.request.top_logprobs);
  }
  const std::span<float> logits = runner_.logits(index, drafted);
  if (logits.empty()) {
    return std::nullopt;
  }
  return sampler_.sample(logits, inputs_.next(sequence, 0));
}

void EngineCore::handle_result(size_t index, const ScheduledSequence& item) {
  Sequence& sequence = *item.sequence;
  const Status read = read_prompt(index, item);
  if (read.ok() && sequence.mask_job != nullptr) {
    // Its mask takes long. Others go on; its last token is computed once more.
    scheduler_->commit(sequence, item.num_tokens - 1);
    return;
  }
  auto sampled = read.ok() ? sample(index, sequence, 0) : Result<SampledToken>(read);
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
  if (accept_token(sequence, std::move(*sampled).value())) {
    verify_draft(index, item);
  }
}

// Goes on as long as what was sampled is what was proposed: then the next row of logits is that of
// the token sampled last. Every token is sampled as if it had a step of its own, so that the answer
// is the same.
void EngineCore::verify_draft(size_t index, const ScheduledSequence& item) {
  if (item.num_draft == 0) {
    return;
  }
  Sequence& sequence = *item.sequence;
  int64_t accepted = 0;
  bool running = true;
  while (running && accepted < item.num_draft &&
         sequence.tokens.back() == sequence.draft[static_cast<size_t>(accepted)]) {
    auto sampled = sample(index, sequence, ++accepted);
    if (sampled->ok()) {
      scheduler_->commit(sequence, 1);
      running = accept_token(sequence, std::move(*sampled).value());
    } else {
      fail(sequence, sampled->status());
      running = false;
    }
  }
  speculator_->learn(running ? &sequence : nullptr, item.num_draft, accepted);
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
  const bool running = event.finish == FinishReason::kNone;
  events_.add(request, std::move(event));
  if (!running) {
    events_.keep(take_out(sequence));
  }
  return running;
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
  report_end(sequence, reason, failure);
  events_.keep(take_out(sequence));
}

void EngineCore::report_end(Sequence& sequence, FinishReason reason, const Status& failure) {
  events_.add(sequence.request, {.prompt_logprobs = std::move(sequence.prompt_scores),
                                 .pooled = pooled_prompt(sequence),
                                 .finish = reason,
                                 .failure = failure,
                                 .prompt_tokens = sequence.prompt_tokens,
                                 .cached_tokens = sequence.cached_tokens,
                                 .queue_seconds = sequence.queue_seconds});
}

}  // namespace nibble
