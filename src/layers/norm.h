#pragma once

#include <cstdint>
#include <utility>

#include "backend/backend.h"

namespace nibble {

/// RMSNorm with a learned weight per channel, in f32.
class RmsNorm final {
 public:
  /// weight [channels] f32, in the backend's memory.
  RmsNorm(DeviceBuffer weight, double eps)
      : weight_(std::move(weight)), eps_(static_cast<float>(eps)) {}

  [[nodiscard]] const float* weight() const { return weight_.as<float>(); }
  [[nodiscard]] float eps() const { return eps_; }

  /// The norm as the first step of a product.
  [[nodiscard]] GemmInput input() const {
    return {.kind = GemmInput::Kind::kRmsNorm, .norm_weight = weight(), .eps = eps_};
  }

 private:
  DeviceBuffer weight_;
  float eps_;
};

}  // namespace nibble
