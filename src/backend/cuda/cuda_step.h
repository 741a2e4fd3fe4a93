#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "backend/cuda/cuda_steps.h"

namespace nibble::cuda {

/// The work of one step while layers issue it. A recorded step is issued once; what is repeated
/// knows its input by the addresses of StepBuffers alone.
class CudaStep final : public Step {
 public:
  CudaStep(const StepPlan& plan, const StepShape& shape, CudaSteps& steps);

  [[nodiscard]] const int32_t* tokens() const override { return steps_.buffers_.tokens(); }
  [[nodiscard]] const int32_t* positions() const override {
    return steps_.buffers_.metadata().row_position;
  }
  /// In decode steps the attention that follows appends, in its own kernel.
  void rope_append_kv(const RopeAppendArgs& args) override;
  void attention(const AttentionArgs& args) override;
  void append_latent(const LatentAppendArgs& args) override;
  void rotate_latent_queries(const LatentQueryArgs& args) override;
  [[nodiscard]] std::vector<RowRange> absorbed_rows(const ExpandedLatentArgs& args) override;
  void attend_expanded(const ExpandedLatentArgs& args) override;
  void normalize(const NormalizeArgs& args) override;
  void add_gated(const GatedAddArgs& args) override;
  /// For steps of few rows, where StepBranch takes them: this is what decides.
  [[nodiscard]] float* begin_branch(int64_t width) override;
  void end_branch() override { steps_.branch_.end(); }
  void take_logit_rows(const float* from, int64_t width, float* to) override;
  void sample(float* logits, int64_t vocab) override;
  /// At the end of the layers: what was begun has been done.
  void finish() const;

 private:
  [[nodiscard]] ResidualKeys residual_of(const KvView& kv) const;
  void turn_back(const AttentionLaunch& launch) const;
  void attend_latent(const AttentionArgs& args);
  /// Whether latent attention has sequences of several rows that are not expanded.
  [[nodiscard]] bool absorbs_prefills() const;
  /// The plan of absorbed attention, unless it is there; whether it was.
  bool plan_absorbed(size_t index, const LatentLaunch& launch);

  /// An append that its layer's attention does as well.
  struct PendingAppend {
    RopeAppendLaunch launch;
    LaunchContext context;
  };

  CudaSteps& steps_;
  StepShape shape_;
  bool to_sample_;                          // the plan says how, and it has not been done
  std::optional<PendingAppend> append_;     // of the layer's attention, which is to come
  uint64_t planned_ = 0;                    // bit i: attention plan i is made
  uint64_t latents_planned_ = 0;            // the same of latent attention
  std::vector<ExpandedSequence> expanded_;  // of the layer whose absorbed_rows() came last
  std::vector<int32_t> left_out_;           // sequences that plans of latent attention are without
};

}  // namespace nibble::cuda
