#include "engine/speculator.h"

#include <algorithm>
#include <utility>

namespace nibble {
namespace {

// Whether its next token alone is still to be computed, and that of an answer.
bool decodes(const ScheduledSequence& item) {
  return item.sequence != nullptr && item.sequence->remaining() == 1 &&
         item.sequence->generated() > 0;
}

}  // namespace

Speculator::Speculator(const EngineOptions& options,
                       std::unique_ptr<DraftModel> draft,
                       SamplerInputs& inputs)
    : options_(options), draft_(std::move(draft)), inputs_(inputs) {}

// Tokens of a sequence that a proposal may have: one more is sampled behind it.
int64_t Speculator::most_for(const Sequence& sequence) const {
  if (sequence.request.constraint != nullptr) {
    return 0;  // its masks are known for the next token alone
  }
  return std::min({options_.speculation.tokens,
                   sequence.request.max_tokens - sequence.generated() - 1,
                   options_.max_model_len - sequence.length() - 1});
}

void Speculator::propose(std::span<const ScheduledSequence> plan, Others others) {
  if (options_.speculation.tokens == 0) {
    return;
  }
  for (const ScheduledSequence& item : plan) {
    if (!decodes(item)) {
      continue;
    }
    item.sequence->draft.clear();
    if (draft_ == nullptr) {
      look_up_one(*item.sequence);
    }
  }
  if (draft_ != nullptr && others == Others::kNone) {
    ask_model(plan);
  }
}

void Speculator::look_up_one(Sequence& sequence) {
  const int64_t most = most_for(sequence);
  if (most > 0) {
    const int64_t count = sequence.draft_length.next(options_.speculation);
    sequence.draft = look_up(sequence.tokens, options_.speculation, std::min(count, most));
  }
}

// A step has few rows for proposals, and passes of a model are not for nothing: there are none
// beside a prompt, and only as many as fit.
void Speculator::ask_model(std::span<const ScheduledSequence> plan) {
  const auto ended = [](const ScheduledSequence& item) { return item.sequence == nullptr; };
  const auto sequences = std::ssize(plan) - std::ranges::count_if(plan, ended);
  const bool few = sequences > 0 && 2 * sequences <= kSpeculatedRows;
  const bool alone = std::ranges::all_of(
      plan, [&](const ScheduledSequence& item) { return ended(item) || decodes(item); });
  if (!few || !alone || clock_.wants_plain_step(sequences)) {
    return;
  }
  const DraftCosts costs = clock_.costs(sequences);
  wishes_.clear();
  for (const ScheduledSequence& item : plan) {
    if (ended(item)) {
      continue;
    }
    const int64_t most =
        std::min(most_for(*item.sequence), (kSpeculatedRows - sequences) / sequences);
    const int64_t count = most > 0 ? item.sequence->draft_gain.next(costs, sequences, most) : 0;
    if (count > 0) {
      wishes_.push_back({item.sequence, count});
    }
  }
  if (!wishes_.empty()) {
    const DraftModel::Work work = draft_->propose(
        wishes_,
        [this](const Sequence& sequence, int64_t ahead) { return inputs_.next(sequence, ahead); });
    clock_.note_passes(sequences, work.passes, work.seconds);
  }
}

void Speculator::learn(Sequence* sequence, int64_t proposed, int64_t accepted) {
  stats_.count(proposed, accepted);
  if (sequence != nullptr) {
    sequence->draft_length.learn(options_.speculation, proposed, accepted);
    sequence->draft_gain.learn(proposed, accepted);
  }
}

void Speculator::note_step(std::span<const ScheduledSequence> plan, double seconds) {
  if (draft_ == nullptr || plan.empty()) {
    return;  // a model's costs alone are measured
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
