#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "ops/attention.h"
#include "ops/latent.h"
#include "ops/rows.h"
#include "ops/sampling.h"

namespace nibble {

struct ExpandedLatentArgs;

/// Rows of a step that lie one behind the other.
struct RowRange {
  int64_t first = 0;
  int64_t count = 0;

  bool operator==(const RowRange&) const = default;
};

/// What a step works on; row r of its activations belongs to tokens[r].
struct StepInput {
  std::span<const int32_t> tokens;
  std::span<const SequenceSpan> sequences;  // which rows are whose
  std::span<const int32_t> logit_rows;      // rows whose logits are wanted, in their order
  bool fed = false;  // tokens are what the step before sampled, row by row; `tokens` says how many
  std::span<const SequenceSpan> other_pools = {};  // see sequences_in_pool()
  bool warm_up = false;  // its tokens are nobody's: what they do to a cache is not warned of
};

/// A step before it runs.
struct StepPlan {
  StepInput input;
  int64_t page_size = 0;        // tokens of a page of the cache
  int64_t program = 0;          // Backend::new_program() of a model with its cache
  SamplingInput sampling = {};  // how the device samples each logit row; no rows: it does not
};

/// Sizes of the largest step.
struct StepLimits {
  int64_t rows = 0;
  int64_t sequences = 0;
  int64_t logit_rows = 0;    // never fewer than sequences
  int64_t positions = 0;     // of one sequence
  int64_t pools = 1;         // of the cache
  int64_t input_width = 0;   // of the products of a layer whose inputs differ, summed
  int64_t top_k = 0;         // experts of a row, in the layers that have them
  int64_t hidden = 0;        // of their inputs
  int64_t expert_width = 0;  // of one
  int64_t shared_width = 0;  // of the expert that every token takes; 0: there is none
  int64_t scaled_pairs = 0;  // of a row's frequencies, where DynamicRope scales them
  int64_t latent_heads = 0;  // of queries, where attention is latent
  int64_t latent_row = 0;    // numbers of a cached row there
  int64_t latent_key = 0;    // numbers of a head's key that are made from the latent
  int64_t latent_value = 0;  // numbers of a head's value
};

/// A step that runs: what layers call besides their products. It lives while Backend::run_step()
/// runs, and its calls take effect in their order, as all of a backend's do.
class Step {
 public:
  virtual ~Step() = default;
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  [[nodiscard]] const StepInput& input() const { return input_; }
  /// Rows that the layers compute: those of the input, or more on devices that record the work of a
  /// step for a few sizes only. Rows past the input's hold anything.
  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] int64_t logit_rows() const { return logit_rows_; }
  /// [rows()] in the backend's memory.
  [[nodiscard]] virtual const int32_t* tokens() const = 0;
  /// Each row's place in its sequence, [rows()] in the backend's memory.
  [[nodiscard]] virtual const int32_t* positions() const = 0;

  /// The attention() of the same layer follows.
  virtual void rope_append_kv(const RopeAppendArgs& args) = 0;
  virtual void attention(const AttentionArgs& args) = 0;
  /// Of latent attention, before attention() over its rows; devices without it refuse its caches
  /// (Backend::check_kv).
  virtual void append_latent(const LatentAppendArgs& args);
  virtual void rotate_latent_queries(const LatentQueryArgs& args);
  /// The rows whose latent attention is computed over cached rows as they are (absorbed). For the
  /// others it costs less to make keys and values first: attention() of the same layer leaves them
  /// out, and attend_expanded() computes them. All rows, where a device does no such thing.
  [[nodiscard]] virtual std::vector<RowRange> absorbed_rows(const ExpandedLatentArgs& args);
  virtual void attend_expanded(const ExpandedLatentArgs& args);
  virtual void normalize(const NormalizeArgs& args) = 0;
  virtual void add_gated(const GatedAddArgs& args) = 0;
  /// Begins a branch: the products that are issued until end_branch() may be computed beside what
  /// is issued behind that, so that neither reads what the other writes. PreparedExperts::run(),
  /// which must follow, waits for it, at the latest in front of adding to its y. Products in it are
  /// those that PreparedGemm::prepare_branch() prepared.
  /// Memory for results, [rows(), width] f32; null: this step has no branches, as on CPUs.
  [[nodiscard]] virtual float* begin_branch(int64_t /*width*/) { return nullptr; }
  virtual void end_branch() {}
  /// out[r] = input(x[r]) as f32 for every row of the step, [rows(), width] in the host's memory:
  /// for observers of products (RowObserver). Only where the backend's memory is the host's.
  virtual void input_rows(const InputRows& args, float* out);
  /// to[i] = from[i-th of input().logit_rows], logit_rows() rows of `width`.
  virtual void take_logit_rows(const float* from, int64_t width, float* to) = 0;
  /// Where the plan says how: samples a token from each row of logits [logit_rows(), vocab] as
  /// Sampler does. They are overwritten.
  virtual void sample(float* logits, int64_t vocab) = 0;

 protected:
  Step(const StepInput& input, int64_t rows, int64_t logit_rows)
      : input_(input), rows_(rows), logit_rows_(logit_rows) {}

 private:
  const StepInput& input_;
  int64_t rows_;
  int64_t logit_rows_;
};

/// What the layers of a model issue for one step.
using StepLayers = std::function<void(Step&)>;

}  // namespace nibble
