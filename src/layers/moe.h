#pragma once

#include <array>
#include <memory>
#include <utility>

#include "arch/config.h"
#include "backend/prepared_experts.h"
#include "layers/forward_context.h"
#include "layers/linear.h"
#include "layers/norm.h"

namespace nibble {

/// hidden += experts(x), where x = norm(hidden), and the same of an expert that every token takes,
/// as much of it as its gate says, where there is one. x is rounded once for all of them.
class Moe final {
 public:
  struct Shared {
    Linear gate_up;  // gate and up, stacked
    Linear down;
    DeviceBuffer gate;  // [hidden] f32; empty: all of it
    int64_t turn = 0;   // of what down multiplies: GemmInput::turn
  };
  struct Parts {
    Norm norm;
    std::unique_ptr<PreparedExperts> experts;
    std::unique_ptr<Shared> shared;  // null: there is none
  };

  Moe(Parts parts, const ModelConfig& config)
      : parts_(std::move(parts)),
        hidden_(config.hidden_size),
        top_k_(config.moe.experts_per_token) {}

  /// Read for one token.
  [[nodiscard]] int64_t weight_bytes() const {
    const int64_t shared =
        parts_.shared ? parts_.shared->gate_up.weight_bytes() + parts_.shared->down.weight_bytes()
                      : 0;
    return parts_.experts->active_bytes(top_k_) + shared;
  }

  [[nodiscard]] static std::array<ScratchNeed, 3> scratch(const ModelConfig& config) {
    const MoeConfig& moe = config.moe;
    return {{{ScratchName::kNormed, config.hidden_size},
             {ScratchName::kUp, 2 * moe.shared_width},
             {ScratchName::kShared, moe.shared_gate ? config.hidden_size : 0}}};
  }

  /// hidden [rows, hidden].
  void forward(float* hidden, const ForwardContext& context);

  /// The parts of forward(), in their order, for those who look between them: x into the scratch
  /// kNormed; the routed experts of x onto hidden; gate and up of the expert that every token takes
  /// into kUp; what its down makes of them onto hidden. The context's observer sees the rows of
  /// that expert.
  void normalize(const float* hidden, const ForwardContext& context) {
    context.step.normalize({.x = hidden,
                            .width = hidden_,
                            .norm = parts_.norm.input(),
                            .out = context.scratch[ScratchName::kNormed]});
  }
  void add_experts(float* hidden, const ForwardContext& context);
  [[nodiscard]] bool has_shared() const { return parts_.shared != nullptr; }
  void project_shared(const ForwardContext& context);
  void add_shared(float* hidden, const ForwardContext& context);

  /// Of what down of the expert that every token takes multiplies: GemmInput::turn.
  [[nodiscard]] int64_t turn() const { return has_shared() ? parts_.shared->turn : 0; }

  /// The rows that the routed experts multiply: PreparedExperts::show_rows().
  [[nodiscard]] PreparedExperts& routed() { return *parts_.experts; }

 private:
  [[nodiscard]] bool is_gated() const { return parts_.shared->gate.size() > 0; }
  /// y += the routed experts of x, then `beside`, if there is one.
  void run_experts(float* y, const float* beside, const ForwardContext& context);
  /// What down of the expert that every token takes makes of kUp, into or onto y, F32.
  [[nodiscard]] GemmArgs shared_output(float* y, const ForwardContext& context) const;
  /// As much of that as its gate says, out of kShared onto hidden.
  void add_gated(float* hidden, const ForwardContext& context);

  Parts parts_;
  int64_t hidden_;
  int64_t top_k_;
};

}  // namespace nibble
