#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arch/config.h"
#include "arch/role.h"

namespace nibble {

enum class TensorKind : uint8_t { kMatrix, kBias, kNorm, kOther };

struct ModelTensor {
  std::string module;
  std::string name;  // with its suffix, where it has one: "lm_head.weight"
  std::vector<int64_t> shape;
  TensorKind kind = TensorKind::kMatrix;
  Role role = Role::kEmbedding;
  int64_t layer = 0;   // of those that belong to one
  int64_t expert = 0;  // of those that belong to a routed one
};

/// Every tensor that an unquantized checkpoint of this model has, in the order of the layers,
/// experts one by one: what load_model() asks for, neither more nor less.
[[nodiscard]] std::vector<ModelTensor> list_tensors(const ModelConfig& config);

}  // namespace nibble
