#include "layers/moe.h"

namespace nibble {

void Moe::add_experts(float* hidden, const ForwardContext& context) {
  parts_.experts->run({.x = context.scratch[ScratchName::kNormed],
                       .x_stride = hidden_,
                       .m = context.rows,
                       .y = hidden,
                       .y_stride = hidden_});
}

void Moe::project_shared(const ForwardContext& context) {
  parts_.shared->gate_up.forward({.x = context.scratch[ScratchName::kNormed],
                                  .m = context.rows,
                                  .y = context.scratch[ScratchName::kUp]},
                                 context);
}

void Moe::add_shared(float* hidden, const ForwardContext& context) {
  Shared& shared = *parts_.shared;
  const bool gated = shared.gate.size() > 0;
  GemmArgs args{.x = context.scratch[ScratchName::kUp],
                .m = context.rows,
                .y = hidden,
                .output = GemmOutput::kAdd,
                .input = {.kind = GemmInput::Kind::kSiluMul, .turn = shared.turn}};
  if (gated) {
    args.y = context.scratch[ScratchName::kShared];
    args.output = GemmOutput::kStore;
  }
  if (shared.down.forward(args, context) == Linear::Done::kYes && gated) {
    context.step.add_gated({.x = context.scratch[ScratchName::kNormed],
                            .gate = shared.gate.as<float>(),
                            .rows = context.scratch[ScratchName::kShared],
                            .width = hidden_,
                            .y = hidden});
  }
}

}  // namespace nibble
