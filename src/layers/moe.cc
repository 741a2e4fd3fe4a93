#include "layers/moe.h"

namespace nibble {

void Moe::forward(float* hidden, const ForwardContext& context) {
  const Activations x = context.scratch[ScratchName::kNormed];
  context.step.normalize({.x = hidden, .width = hidden_, .norm = parts_.norm.input(), .out = x});
  parts_.experts->run(
      {.x = x, .x_stride = hidden_, .m = context.rows, .y = hidden, .y_stride = hidden_});
  if (parts_.shared) {
    add_shared(hidden, context);
  }
}

void Moe::add_shared(float* hidden, const ForwardContext& context) {
  const Activations x = context.scratch[ScratchName::kNormed];
  const Activations gate_up = context.scratch[ScratchName::kUp];
  const GemmInput activation{.kind = GemmInput::Kind::kSiluMul};
  Shared& shared = *parts_.shared;
  shared.gate_up.forward({.x = x, .m = context.rows, .y = gate_up});
  if (shared.gate.size() == 0) {
    shared.down.forward({.x = gate_up,
                         .m = context.rows,
                         .y = hidden,
                         .output = GemmOutput::kAdd,
                         .input = activation});
    return;
  }
  const Activations result = context.scratch[ScratchName::kShared];
  shared.down.forward({.x = gate_up, .m = context.rows, .y = result, .input = activation});
  context.step.add_gated(
      {.x = x, .gate = shared.gate.as<float>(), .rows = result, .width = hidden_, .y = hidden});
}

}  // namespace nibble
