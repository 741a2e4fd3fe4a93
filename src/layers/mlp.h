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
    int64_t turn = 0;  // of what down multiplies: GemmInput::turn
  };

  explicit Mlp(Parts parts) : parts_(std::move(parts)) {}

  [[nodiscard]] int64_t weight_bytes() const {
    return parts_.up.weight_bytes() + parts_.down.weight_bytes();
  }

  /// Of what down multiplies: GemmInput::turn.
  [[nodiscard]] int64_t turn() const { return parts_.turn; }

  [[nodiscard]] static std::array<ScratchNeed, 1> scratch(const ModelConfig& config) {
    return {{{ScratchName::kUp, input_width(config.activation, config.intermediate_size)}}};
  }

  /// hidden [rows, hidden].
  void forward(float* hidden, const ForwardContext& context) {
    project(hidden, context);
    add_output(hidden, context);
  }

  /// The parts of forward(), in their order, for those who look between them: up, or gate and up,
  /// into the scratch kUp; what down makes of them onto hidden.
  void project(const float* hidden, const ForwardContext& context) {
    parts_.up.forward({.x = hidden,
                       .m = context.rows,
                       .y = context.scratch[ScratchName::kUp],
                       .input = parts_.norm.input()},
                      context);
  }
  void add_output(float* hidden, const ForwardContext& context) {
    parts_.down.forward({.x = context.scratch[ScratchName::kUp],
                         .m = context.rows,
                         .y = hidden,
                         .output = GemmOutput::kAdd,
                         .input = {.kind = parts_.activation, .turn = parts_.turn}},
                        context);
  }

 private:
  Parts parts_;
};

}  // namespace nibble
