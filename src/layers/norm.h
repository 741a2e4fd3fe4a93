#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "backend/backend.h"

namespace nibble {

/// RMSNorm with a learned weight per channel, or LayerNorm with a bias as well, in f32.
class Norm final {
 public:
  /// weight [channels] f32, in the backend's memory.
  Norm(DeviceBuffer weight, double eps)
      : weight_(std::move(weight)), eps_(static_cast<float>(eps)) {}
  /// LayerNorm; bias likewise.
  Norm(DeviceBuffer weight, DeviceBuffer bias, double eps)
      : weight_(std::move(weight)), bias_(std::move(bias)), eps_(static_cast<float>(eps)) {}

  [[nodiscard]] const float* weight() const { return weight_.as<float>(); }
  [[nodiscard]] float eps() const { return eps_; }

  /// The norm as the first step of a product.
  [[nodiscard]] GemmInput input() const {
    const bool layer = bias_.size() > 0;
    return {.kind = layer ? GemmInput::Kind::kLayerNorm : GemmInput::Kind::kRmsNorm,
            .norm_weight = weight(),
            .eps = eps_,
            .norm_bias = layer ? bias_.as<float>() : nullptr};
  }

  /// Norms rows [rows, channels] of the host's memory in place, on the host.
  void apply(Backend& backend, std::span<float> rows) const;

 private:
  DeviceBuffer weight_;
  DeviceBuffer bias_;  // empty: RMSNorm
  float eps_;
};

}  // namespace nibble
