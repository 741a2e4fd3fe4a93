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
  ///   rows: most of a step with proposals
  Speculator(const EngineOptions& options,
             int64_t rows,
             std::unique_ptr<DraftModel> draft,
             SamplerInputs& inputs);

  /// Decides for which sequences of a step tokens may be proposed once the step's own are known,
  /// and how many; whether for any. `waiting` sequences may join the next step, and leave no room
  /// for what a draft model would propose. Call it once a step, before its results are taken.
  enum class Others : uint8_t { kNone, kWaiting };
  [[nodiscard]] bool decide(std::span<const ScheduledSequence> plan, Others others);
  /// Fills in the drafts of these sequences, and empties those of the others.
  void propose(std::span<const ScheduledSequence> plan);
  /// Of the proposals of a sequence, null where it has ended, so many were right.
  void learn(Sequence* sequence, int64_t proposed, int64_t accepted);
  /// How long a step took.
  void note_step(std::span<const ScheduledSequence> plan, double seconds);

  [[nodiscard]] const SpeculationStats& stats() const { return stats_; }
  /// Null where there is none.
  [[nodiscard]] const DraftModel* draft_model() const { return draft_.get(); }

 private:
  [[nodiscard]] int64_t most_for(const Sequence& sequence) const;
  [[nodiscard]] bool model_fits(std::span<const ScheduledSequence> plan, Others others) const;
  void ask_model(int64_t sequences);

  const EngineOptions options_;
  const int64_t rows_;
  std::unique_ptr<DraftModel> draft_;
  SamplerInputs& inputs_;
  DraftClock clock_;
  SpeculationStats stats_;
  std::vector<int64_t> counts_;           // by plan index: most that are proposed next
  std::vector<DraftModel::Wish> wishes_;  // scratch
};

}  // namespace nibble
