#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backend/prepared_experts.h"
#include "base/status.h"
#include "core/gemm_input.h"
#include "core/router_form.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"

namespace nibble {

/// A layer of experts, by its sizes and what it computes.
struct MoeShape {
  std::string_view name;
  int64_t experts = 0;      // of this device
  int64_t all_experts = 0;  // of the layer, shared out evenly among devices
  int64_t top_k = 0;        // experts of a row, at most those of this device
  int64_t hidden = 0;
  int64_t width = 0;  // of an expert
  RouterForm router = {.renormalise = true};
  GemmInput::Kind activation = GemmInput::Kind::kSiluMul;
  float limit = 0.0F;       // of kClampedSwiglu
  bool biases = false;      // of router and experts
  bool correction = false;  // of the router

  /// Rows that this device computes of `m` rows of all devices, each with all of its top_k experts
  /// here: as many slots as there are on the average, but those of one row at least.
  [[nodiscard]] int64_t rows_of(int64_t m) const;
  /// What `m` and `rows` of a report mean where they differ; empty where they do not.
  [[nodiscard]] std::string rows_note() const;
};

/// The layer of a published model. kInvalidArgument with the list of names.
[[nodiscard]] Result<MoeShape> find_moe_shape(std::string_view name);
/// "gpt-oss-20b, ...".
[[nodiscard]] std::string moe_shape_names();
/// kInvalidArgument for sizes that no layer has, or that rows cannot be steered through.
[[nodiscard]] Status check_moe_shape(const MoeShape& shape);

/// Random weights of a layer, on the host. All experts have the same ones: what is prepared of them
/// is memory of each expert's own, and the time of a product does not depend on the weights.
class MoeWeights final {
 public:
  /// The router steers rows (bench/moe/steering.h). kUnsupported for a scheme whose groups do not
  /// divide the sizes, kResourceExhausted.
  static Result<MoeWeights> create(const MoeShape& shape, const QuantScheme& scheme);

  /// For activations in BF16 between the products. The views end with this object.
  [[nodiscard]] ExpertsRequest request(int64_t max_m) const;

 private:
  MoeWeights() = default;

  ExpertsForm form_;
  QuantTensor router_;
  QuantTensor gate_;
  QuantTensor up_;
  QuantTensor down_;
  std::vector<ExpertsRequest::Expert> experts_;
  std::vector<float> router_bias_;
  std::vector<float> correction_;
  std::vector<float> gate_up_bias_;
  std::vector<float> down_bias_;
};

}  // namespace nibble
