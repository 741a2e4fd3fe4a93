#include "engine/speculator.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace nibble {
namespace {

// Whether its next token alone is still to be computed, and that of an answer.
bool decodes(const ScheduledSequence& item) {
  return item.sequence != nullptr && item.sequence->remaining() == 1 &&
         item.sequence->generated() > 0;
}

// Whether it decodes once the step is done, unless it ends there.
bool will_decode(const ScheduledSequence& item) {
  return item.sequence->remaining() == item.num_tokens;
}

int64_t running(std::span<const ScheduledSequence> plan) {
  return std::ranges::count_if(
      plan, [](const ScheduledSequence& item) { return item.sequence != nullptr; });
}

}  // namespace

Speculator::Speculator(const EngineOptions& options,
                       int64_t rows,
                       std::unique_ptr<DraftModel> draft,
                       SamplerInputs& inputs)
    : options_(options), rows_(rows), draft_(std::move(draft)), inputs_(inputs) {}

// Tokens of a sequence that a proposal may have: one more is sampled behind it.
int64_t Speculator::most_for(const Sequence& sequence) const {
  if (sequence.request.constraint != nullptr) {
    return 0;  // its masks are known for the next token alone
  }
  return std::min({options_.speculation.tokens,
                   sequence.request.max_tokens - sequence.generated() - 1,
                   options_.max_model_len - sequence.length() - 1});
}

// Passes of a model are not for nothing: it proposes nothing beside a prompt, or for more sequences
// than can have a proposal each.
bool Speculator::model_fits(std::span<const ScheduledSequence> plan, Others others) const {
  return others == Others::kNone && 2 * running(plan) <= rows_ &&
         std::ranges::all_of(plan, [](const ScheduledSequence& item) {
           return item.sequence == nullptr || will_decode(item);
         });
}

bool Speculator::decide(std::span<const ScheduledSequence> plan, Others others) {
  counts_.assign(plan.size(), 0);
  const int64_t sequences = running(plan);
  if (options_.speculation.tokens == 0 || sequences == 0 || sequences >= rows_ ||
      (draft_ != nullptr && !model_fits(plan, others)) || clock_.wants_plain_step(sequences)) {
    return false;
  }
  const DraftCosts costs = clock_.costs(sequences);
  const int64_t most = std::min(options_.speculation.tokens,
                                draft_ != nullptr ? rows_ / sequences - 1 : rows_ - sequences);
  bool any = false;
  for (size_t i = 0; i < plan.size(); ++i) {
    const ScheduledSequence& item = plan[i];
    if (item.sequence == nullptr || !will_decode(item) || most_for(*item.sequence) <= 1) {
      continue;
    }
    // Where nothing can be found, nothing is asked for: a pause is one of proposals.
    if (draft_ != nullptr || item.num_draft > 0 ||
        may_follow(item.sequence->tokens, options_.speculation)) {
      counts_[i] = item.sequence->draft_gain.next(costs, sequences, most);
      any = any || counts_[i] > 0;
    }
  }
  return any;
}

void Speculator::propose(std::span<const ScheduledSequence> plan) {
  CHECK_EQ(plan.size(), counts_.size());
  wishes_.clear();
  for (size_t i = 0; i < plan.size(); ++i) {
    if (plan[i].sequence == nullptr) {
      continue;
    }
    Sequence& sequence = *plan[i].sequence;
    sequence.draft.clear();
    const int64_t count = std::min(counts_[i], most_for(sequence));
    if (count <= 0 || !decodes(plan[i])) {
      continue;
    }
    if (draft_ == nullptr) {
      sequence.draft = look_up(sequence.tokens, options_.speculation, count);
    } else {
      wishes_.push_back({&sequence, count});
    }
  }
  if (!wishes_.empty()) {
    ask_model(running(plan));
  }
}

void Speculator::ask_model(int64_t sequences) {
  const DraftModel::Work work = draft_->propose(
      wishes_,
      [this](const Sequence& sequence, int64_t ahead) { return inputs_.next(sequence, ahead); });
  clock_.note_passes(sequences, work.passes, work.seconds);
}

void Speculator::learn(Sequence* sequence, int64_t proposed, int64_t accepted) {
  stats_.count(proposed, accepted);
  if (sequence != nullptr) {
    sequence->draft_gain.learn(proposed, accepted);
  }
}

void Speculator::note_step(std::span<const ScheduledSequence> plan, double seconds) {
  if (options_.speculation.tokens == 0 || plan.empty()) {
    return;
  }
  int64_t drafted = 0;
  for (const ScheduledSequence& item : plan) {
    if (item.num_tokens != 1) {
      return;
    }
    drafted += item.num_draft;
  }
  clock_.note_step(std::ssize(plan), drafted, seconds);
}

}  // namespace nibble
