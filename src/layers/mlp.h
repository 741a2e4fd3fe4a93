#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "arch/config.h"
#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/norm.h"

namespace nibble {

/// hidden += down(activation(up(norm(hidden)))); norm and activation happen where the products read
/// their rows.
class Mlp final {
 public:
  struct Parts {
    Norm norm;
    Linear up;    // [intermediate, hidden]; gate and up, stacked, where there is a gate
    Linear down;  // [hidden, intermediate]
    GemmInput::Kind activation = GemmInput::Kind::kSiluMul;
  };

  explicit Mlp(Parts parts) : parts_(std::move(parts)) {}

  [[nodiscard]] int64_t weight_bytes() const {
    return parts_.up.weight_bytes() + parts_.down.weight_bytes();
  }

  [[nodiscard]] static std::array<ScratchNeed, 1> scratch(const ModelConfig& config) {
    return {{{ScratchName::kUp, input_width(config.activation, config.intermediate_size)}}};
  }

  /// hidden [rows, hidden].
  void forward(float* hidden, const ForwardContext& context) {
    const Activations up = context.scratch[ScratchName::kUp];
    parts_.up.forward({.x = hidden, .m = context.rows, .y = up, .input = parts_.norm.input()});
    parts_.down.forward({.x = up,
                         .m = context.rows,
                         .y = hidden,
                         .output = GemmOutput::kAdd,
                         .input = {.kind = parts_.activation}});
  }

 private:
  Parts parts_;
};

}  // namespace nibble
