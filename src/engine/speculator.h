#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/draft_model.h"
#include "engine/sampler_inputs.h"
#include "engine/scheduler.h"

namespace nibble {

/// Proposes tokens for sequences, by prompt lookup or by a draft model, and learns from what became
/// of them. Those that have none in Sequence::draft just go on token by token.
class Speculator final {
 public:
  /// `options` must be resolved; `draft` may be null, and `inputs` outlives it.
  Speculator(const EngineOptions& options,
             std::unique_ptr<DraftModel> draft,
             SamplerInputs& inputs);

  /// Fills in the drafts of a step's sequences that have all but their last token computed.
  /// `waiting` ones may join the next step, and leave no room for what a draft model would propose.
  enum class Others : uint8_t { kNone, kWaiting };
  void propose(std::span<const ScheduledSequence> plan, Others others);
  /// Of the proposals of a sequence, null where it has ended, so many were right.
  void learn(Sequence* sequence, int64_t proposed, int64_t accepted);
  /// How long a step took.
  void note_step(std::span<const ScheduledSequence> plan, double seconds);

  [[nodiscard]] const SpeculationStats& stats() const { return stats_; }
  /// Null where there is none.
  [[nodiscard]] const DraftModel* draft_model() const { return draft_.get(); }

 private:
  [[nodiscard]] int64_t most_for(const Sequence& sequence) const;
  void look_up_one(Sequence& sequence);
  void ask_model(std::span<const ScheduledSequence> plan);

  const EngineOptions options_;
  std::unique_ptr<DraftModel> draft_;
  SamplerInputs& inputs_;
  DraftClock clock_;
  SpeculationStats stats_;
  std::vector<DraftModel::Wish> wishes_;  // scratch
};

}  // namespace nibble
