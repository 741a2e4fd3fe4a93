#pragma once

#include <vector>

#include "backend/cpu/cpu_attention.h"
#include "backend/cpu/cpu_latent.h"
#include "backend/cpu/workspace.h"
#include "backend/step.h"

namespace nibble::cpu {

/// A step on the CPU, which computes as it is called.
class CpuStep final : public Step {
 public:
  /// What steps work with.
  struct Device {
    const KernelTable& kernels;
    Workspace& workspace;
    CpuAttention& attention;
  };

  CpuStep(const StepPlan& plan, const Device& device);

  [[nodiscard]] const int32_t* tokens() const override { return input().tokens.data(); }
  [[nodiscard]] const int32_t* positions() const override { return positions_.data(); }
  void rope_append_kv(const RopeAppendArgs& args) override {
    device_.attention.rope_append_kv(args);
  }
  void attention(const AttentionArgs& args) override { device_.attention.attention(args); }
  void append_latent(const LatentAppendArgs& args) override {
    cpu::append_latent(device_.kernels, device_.workspace, args);
  }
  void rotate_latent_queries(const LatentQueryArgs& args) override {
    cpu::rotate_latent_queries(device_.kernels, device_.workspace, args);
  }
  void normalize(const NormalizeArgs& args) override;
  void add_gated(const GatedAddArgs& args) override;
  void input_rows(const InputRows& args, float* out) override;
  void take_logit_rows(const float* from, int64_t width, float* to) override;
  /// The host samples: a plan that says otherwise is refused.
  void sample(float* logits, int64_t vocab) override;

 private:
  Device device_;
  std::vector<int32_t> positions_;
};

}  // namespace nibble::cpu
