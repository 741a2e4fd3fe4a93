#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "arch/config.h"
#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/norm.h"

namespace nibble {

/// hidden += down(silu(gate(norm(hidden))) * up(norm(hidden))), gate and up being one stacked
/// product; the norm and silu·mul happen where the products read their rows.
class GatedMlp final {
 public:
  /// gate_up [2 * intermediate, hidden]; down [hidden, intermediate].
  GatedMlp(RmsNorm norm, Linear gate_up, Linear down)
      : norm_(std::move(norm)), gate_up_(std::move(gate_up)), down_(std::move(down)) {}

  [[nodiscard]] int64_t weight_bytes() const {
    return gate_up_.weight_bytes() + down_.weight_bytes();
  }

  [[nodiscard]] static std::array<ScratchNeed, 1> scratch(const ModelConfig& config) {
    return {{{ScratchName::kGateUp, 2 * config.intermediate_size}}};
  }

  /// hidden [rows, hidden].
  void forward(float* hidden, const ForwardContext& context) {
    const Activations gate_up = context.scratch[ScratchName::kGateUp];
    gate_up_.forward({.x = hidden, .m = context.rows, .y = gate_up, .input = norm_.input()});
    down_.forward({.x = gate_up,
                   .m = context.rows,
                   .y = hidden,
                   .output = GemmOutput::kAdd,
                   .input = {.kind = GemmInput::Kind::kSiluMul}});
  }

 private:
  RmsNorm norm_;
  Linear gate_up_;
  Linear down_;
};

}  // namespace nibble
