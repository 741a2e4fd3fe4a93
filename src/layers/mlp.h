#pragma once

#include <cstdint>
#include <utility>

#include "layers/forward_context.h"
#include "layers/linear.h"

namespace nibble {

/// hidden += down(silu(gate(x)) * up(x)), gate and up being one stacked product.
class GatedMlp final {
 public:
  /// gate_up [2 * intermediate, hidden]; down [hidden, intermediate].
  GatedMlp(Linear gate_up, Linear down) : gate_up_(std::move(gate_up)), down_(std::move(down)) {}

  [[nodiscard]] int64_t weight_bytes() const {
    return gate_up_.weight_bytes() + down_.weight_bytes();
  }

  /// x, hidden [rows, hidden].
  void forward(const float* x, float* hidden, const ForwardContext& context) {
    Backend& backend = context.backend;
    gate_up_.forward(x, context.rows, context.gate_up, GemmOutput::kStore, backend);
    backend.silu_mul(context.gate_up, context.rows, down_.k(), context.activated);
    down_.forward(context.activated, context.rows, hidden, GemmOutput::kAdd, backend);
  }

 private:
  Linear gate_up_;
  Linear down_;
};

}  // namespace nibble
