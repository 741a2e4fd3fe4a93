#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "core/buffer.h"
#include "engine/scheduler.h"
#include "model/model.h"

namespace nibble {

/// Turns a planned step into the model's input and runs it. Its buffers are made once, for the
/// largest step.
class ModelRunner final {
 public:
  /// kResourceExhausted when the logits' memory is not to be had.
  static Result<ModelRunner> create(Model& model,
                                    PagedKvCache cache,
                                    const SchedulerLimits& limits);

  /// Runs a greedy step of one sequence of `num_tokens` tokens that belong to no request, so that
  /// what a device does when it first meets such a step is done. It writes to the first pages of
  /// each pool, which must be nobody's and hold so many tokens.
  void warm_up(int64_t num_tokens);
  /// The same for a step that verifies proposals, of so many rows together, greedily and by chance.
  void warm_up_proposals(int64_t rows);
  /// Runs the model over `plan`. Afterwards logits(i) is the row of the i-th planned sequence, if
  /// the step reaches its last token.
  void run(std::span<const ScheduledSequence> plan);
  /// Starts the model, which samples tokens where it computes: `sampling` has a row for each
  /// planned sequence whose last token the step reaches, in their order. With `ahead`, the last
  /// step started has the same sequences, its samples are their next tokens, and it need not be
  /// finished; else a planned sequence with a draft has one row more for each of its tokens.
  /// Without rows of `sampling`, sample() has to follow before anything else.
  void start(std::span<const ScheduledSequence> plan, const SamplingInput& sampling, bool ahead);
  void sample(const SamplingInput& sampling);
  /// Waits for the earliest step that was started. Afterwards sampled(i) is what its plan[i]
  /// became.
  void finish();
  /// Logits [vocab_size] of plan[index] behind its last token and so many of its draft; empty when
  /// the step ends inside its prompt, or no token is wanted.
  [[nodiscard]] std::span<float> logits(size_t index, int64_t drafted = 0);
  /// Logits [rows, vocab_size] that score prompt tokens of plan[index] (Sequence::prompt_rows).
  [[nodiscard]] std::span<const float> prompt_logits(size_t index) const;
  /// Final hidden states [rows, hidden_size] of tokens of plan[index], the first of which stands
  /// `first` behind the first that the step computes of it. After run().
  void final_states(size_t index, int64_t first, std::span<float> out) const;
  /// The sample of plan[index] behind its last token and so many of its draft; null when the step
  /// ends inside its prompt.
  [[nodiscard]] const SampledRow* sampled(size_t index, int64_t drafted = 0) const;

 private:
  ModelRunner(Model& model, PagedKvCache cache) : model_(&model), cache_(std::move(cache)) {}

  [[nodiscard]] StepInput batch_of(std::span<const ScheduledSequence> plan, bool ahead);
  /// batch_of()'s step.
  void start(const StepInput& batch, const SamplingInput& sampling);
  void add_spans(SequenceSpan whole, int64_t num_draft);
  void add_other_pools(std::span<const ScheduledSequence> plan);

  Model* model_;
  PagedKvCache cache_;
  Buffer logits_;                    // [max_num_seqs + max_prompt_rows, vocab_size] f32
  std::vector<SampledRow> sampled_;  // [logit rows] of the step finished last
  std::vector<int32_t> tokens_;
  std::vector<SequenceSpan> spans_;
  std::vector<SequenceSpan> other_pools_;
  std::vector<int32_t> logit_rows_;
  struct RowSpan {
    size_t first = 0, count = 0;
  };
  std::vector<RowSpan> prompt_rows_;  // by plan index: rows of logits_
  std::vector<int32_t> sampled_rows_;
  std::vector<int32_t> first_rows_;  // by plan index: of the step
  std::vector<int32_t> logits_of_;   // by plan index: row of logits_ or sampled_, or -1
  struct StartedStep {
    std::vector<int32_t> logits_of;
    size_t rows = 0;  // that are sampled
  };
  std::deque<StartedStep> started_;  // steps that are not finished
};

}  // namespace nibble
