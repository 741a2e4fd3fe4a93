#include "layers/moe.h"

namespace nibble {

void Moe::forward(float* hidden, const ForwardContext& context) {
  normalize(hidden, context);
  float* const beside =
      has_shared() && context.observer == nullptr ? context.step.begin_branch(hidden_) : nullptr;
  if (beside == nullptr) {
    add_experts(hidden, context);
    if (has_shared()) {
      project_shared(context);
      add_shared(hidden, context);
    }
    return;
  }
  project_shared(context);
  GemmArgs output = shared_output(beside, context);
  output.output = GemmOutput::kStore;
  parts_.shared->down.forward(output, context);
  context.step.end_branch();
  run_experts(hidden, is_gated() ? nullptr : beside, context);
  if (is_gated()) {
    add_gated(hidden, context);
  }
}

void Moe::run_experts(float* y, const float* beside, const ForwardContext& context) {
  parts_.experts->run({.x = context.scratch[ScratchName::kNormed],
                       .x_stride = hidden_,
                       .m = context.rows,
                       .y = y,
                       .y_stride = hidden_,
                       .beside = beside});
}

void Moe::add_experts(float* hidden, const ForwardContext& context) {
  run_experts(hidden, nullptr, context);
}

void Moe::project_shared(const ForwardContext& context) {
  parts_.shared->gate_up.forward({.x = context.scratch[ScratchName::kNormed],
                                  .m = context.rows,
                                  .y = context.scratch[ScratchName::kUp]},
                                 context);
}

GemmArgs Moe::shared_output(float* y, const ForwardContext& context) const {
  GemmArgs args{.x = context.scratch[ScratchName::kUp],
                .m = context.rows,
                .y = y,
                .output = GemmOutput::kAdd,
                .input = {.kind = GemmInput::Kind::kSiluMul, .turn = parts_.shared->turn}};
  if (is_gated()) {
    args.y = context.scratch[ScratchName::kShared];
    args.output = GemmOutput::kStore;
  }
  return args;
}

void Moe::add_gated(float* hidden, const ForwardContext& context) {
  context.step.add_gated({.x = context.scratch[ScratchName::kNormed],
                          .gate = parts_.shared->gate.as<float>(),
                          .rows = context.scratch[ScratchName::kShared],
                          .width = hidden_,
                          .y = hidden});
}

void Moe::add_shared(float* hidden, const ForwardContext& context) {
  const GemmArgs args = shared_output(hidden, context);
  if (parts_.shared->down.forward(args, context) == Linear::Done::kYes && is_gated()) {
    add_gated(hidden, context);
  }
}

}  // namespace nibble
