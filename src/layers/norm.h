#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "backend/backend.h"

namespace nibble {

/// RMSNorm with a learned weight per channel, in f32.
class RmsNorm final {
 public:
  RmsNorm(std::vector<float> weight, double eps)
      : weight_(std::move(weight)), eps_(static_cast<float>(eps)) {}

  [[nodiscard]] int64_t size() const { return static_cast<int64_t>(weight_.size()); }

  /// The norm as the first step of a product.
  [[nodiscard]] GemmInput input() const {
    return {.kind = GemmInput::Kind::kRmsNorm, .norm_weight = weight_.data(), .eps = eps_};
  }

  /// x, y [rows, size()]; they may be the same memory.
  void forward(const float* x, int64_t rows, float* y, Backend& backend) const {
    backend.rms_norm(x, rows, size(), weight_.data(), eps_, y);
  }

 private:
  std::vector<float> weight_;
  float eps_;
};

}  // namespace nibble
