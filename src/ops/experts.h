#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/gemm_input.h"
#include "core/router_form.h"
#include "ops/activations.h"
#include "quant/act_spec.h"
#include "quant/quant_tensor.h"

namespace nibble {

/// What the experts of a layer have in common, their weights aside.
struct ExpertsForm {
  RouterForm router;
  int64_t top_k = 0;                                       // experts of a token
  GemmInput::Kind activation = GemmInput::Kind::kSiluMul;  // of gate and up
  float limit = 0.0F;                                      // of kClampedSwiglu
  ActSpec act;                                             // of the rows that gate and up read
  ActSpec down_act;                                        // of those that down reads
  std::vector<ActSpec> down_acts;  // in its place that of each expert, in one format; or empty

  [[nodiscard]] const ActSpec& down_act_of(size_t expert) const {
    return down_acts.empty() ? down_act : down_acts[expert];
  }
};

/// y += the experts of x, for m rows:
///   logits = router · x (+ bias), in F32; route() chooses top_k experts of each row and weighs
///   them y += sum over them, in the order of choice, of weight * expert(x), where expert(x) = down
///   · activation(gate · x (+ bias), up · x (+ bias)) (+ bias) x [m, hidden], rows x_stride
///   elements apart y [m, hidden] f32, rows y_stride elements apart
/// A row of y depends only on its row of x.
struct ExpertArgs {
  ConstActivations x;
  int64_t x_stride = 0;
  int64_t m = 0;
  float* y = nullptr;
  int64_t y_stride = 0;
  // [m, hidden], dense: added to y behind the experts. A branch of the step (Step::begin_branch())
  // has computed it; null: nothing, and always on devices without branches.
  const float* beside = nullptr;
};

/// Weights of a layer's experts as an oracle reads them.
struct ReferenceExperts {
  ExpertsForm form;
  QuantTensor router;                // [experts, hidden]
  std::vector<float> router_bias;    // [experts], or empty
  std::vector<float> correction;     // likewise
  std::vector<QuantTensor> gate_up;  // of each expert [2 width, hidden]: gate, then up
  std::vector<QuantTensor> down;     // [hidden, width]
  std::vector<float> gate_up_bias;   // [experts, 2 width], or empty
  std::vector<float> down_bias;      // [experts, hidden], or empty
  DType between = DType::kF32;       // that results of gate and up are rounded to
};

/// One row and expert after the other, by reference_gemm() and reference_route(): the oracle of
/// every kernel of experts.
void reference_experts(const ReferenceExperts& experts, const ExpertArgs& args);

}  // namespace nibble
