#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include "backend/cuda/attention.h"
#include "backend/cuda/expanded_latents.h"
#include "backend/cuda/latent_plans.h"
#include "backend/cuda/memory.h"
#include "backend/cuda/packed_matrices.h"
#include "backend/cuda/scaled_rope.h"
#include "backend/cuda/static_ranges.h"
#include "backend/cuda/step_branch.h"
#include "backend/cuda/step_buffers.h"
#include "backend/cuda/step_recorder.h"
#include "backend/cuda/step_sampler.h"
#include "backend/step.h"

namespace nibble::cuda {

[[nodiscard]] inline KvLayout layout_of(const KvView& kv) {
  return {.code = kv.code,
          .page_size = static_cast<int32_t>(kv.page_size),
          .kv_heads = static_cast<int32_t>(kv.kv_heads),
          .head_dim = static_cast<int32_t>(kv.head_dim)};
}

/// Plans of attention, one for each kind of layers, at addresses that recorded steps keep.
class AttentionPlans final {
 public:
  explicit AttentionPlans(const StepLimits& limits) : limits_(limits) {}

  /// Number of the plan for layers of this shape; allocated when the shape first occurs.
  size_t find(const AttentionShape& shape);
  [[nodiscard]] void* plan(size_t index) const { return plans_[index].memory.as<void>(); }
  /// Of all plans: one attention runs at a time.
  [[nodiscard]] void* workspace() const { return workspace_.as<void>(); }

 private:
  struct Plan {
    AttentionShape shape;
    DeviceBuffer memory;
  };

  StepLimits limits_;
  std::vector<Plan> plans_;
  DeviceBuffer workspace_;
  std::vector<DeviceBuffer> retired_;  // recorded steps may use them
};

/// What steps of either kind need.
[[nodiscard]] StepLimits both(const StepLimits& a, const StepLimits& b);

/// Runs steps on one stream, but for their branches: what they share, and the records of decode
/// steps.
class CudaSteps final {
 public:
  enum class Recording : uint8_t { kNone, kDecodeSteps };

  /// What steps have of their backend, which outlives them.
  struct Place {
    cudaStream_t stream;
    StepBranch& branch;
    StepRows& rows;  // of the step that is run
  };

  /// kResourceExhausted.
  static Result<std::unique_ptr<CudaSteps>> create(const StepLimits& limits,
                                                   Recording recording,
                                                   const Place& place);

  [[nodiscard]] const StepLimits& limits() const { return limits_; }

  void run(const StepPlan& plan, const StepLayers& layers);
  /// Backend::finish_step().
  void finish(std::span<SampledRow> out);
  /// After a step that ended otherwise, such as by reading its logits: warns of what it counted.
  void report_ranges();

 private:
  friend class CudaStep;

  CudaSteps(const StepLimits& limits, Recording recording, const Place& place)
      : limits_(limits),
        recording_(recording),
        stream_(place.stream),
        branch_(place.branch),
        rows_(place.rows),
        recorder_(place.stream),
        attention_plans_(limits),
        latent_plans_(limits) {}

  /// A number that tells apart the steps of one size whose work differs.
  [[nodiscard]] int64_t record_key(const StepPlan& plan, const StepShape& shape) const;

  StepLimits limits_;
  Recording recording_;
  cudaStream_t stream_;
  StepBranch& branch_;
  StepRows& rows_;
  StepBuffers buffers_;
  StepSampler sampler_;
  StepRecorder recorder_;
  AttentionPlans attention_plans_;
  LatentPlans latent_plans_;
  std::unique_ptr<ExpandedLatents> expanded_;  // null: no layer's attention is expanded
  ScaledRope scaled_rope_;
  StaticRanges static_ranges_;
  bool warming_up_ = false;  // with the step that was run last, the only one under way then
};

}  // namespace nibble::cuda
