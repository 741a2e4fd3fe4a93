#pragma once

#include <cstdint>

#include "backend/cpu/kernel_table.h"
#include "backend/cpu/kv_writer.h"
#include "backend/range_report.h"
#include "backend/step.h"
#include "base/thread_pool.h"
#include "core/buffer.h"
#include "ops/attention.h"

namespace nibble::cpu {

/// Rotation, cache writes and attention of the CPU backend, spread over its threads. All scratch
/// memory is allocated once; pages that a model does not need are never touched.
class CpuAttention final {
 public:
  CpuAttention(const KernelTable& kernels, ThreadPool& pool) : kernels_(kernels), pool_(pool) {}

  Status allocate_scratch();
  /// What latent attention touches of it in steps of these sizes; 0 without.
  [[nodiscard]] static int64_t latent_bytes(const StepLimits& limits, int64_t threads);

  void rope_append_kv(const RopeAppendArgs& args);
  void attention(const AttentionArgs& args);

 private:
  struct Plan;
  struct RotatedPlace {
    int64_t position = -1;  // -1: none
    double growth = 1.0;    // base_growth()
  };

  void select_rotation(const RopeAppendArgs& args);
  void rope_append_token(const RopeAppendArgs& args,
                         const KvWriter& writer,
                         int64_t index,
                         int64_t token);
  void code_full_groups(const RopeAppendArgs& args, const KvWriter& writer);
  const float* rotation_of(const RopeAppendArgs& args,
                           const SequenceSpan& sequence,
                           int64_t token,
                           float* spare);
  [[nodiscard]] Plan plan_of(const AttentionArgs& args) const;
  void cut_keys(const AttentionArgs& args, Plan& plan) const;
  void run_pieces(const AttentionArgs& args, const Plan& plan);

  const KernelTable& kernels_;
  ThreadPool& pool_;
  Buffer scratch_;   // per thread
  Buffer partials_;  // sums over pieces that run as tasks of their own
  // Cosines and sines of each row of the batch, kept from layer to layer while its place stays.
  Buffer rotations_;       // [row][cos [dim/2], sin [dim/2]]
  Buffer rotated_places_;  // [row] of RotatedPlace
  float inv_freq_[kMaxHeadDim / 2] = {};
  float attention_factor_ = 0.0F;
  int64_t rotation_dim_ = 0;
  RangeReport report_;
};

}  // namespace nibble::cpu
