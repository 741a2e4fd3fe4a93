#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"

namespace nibble {

enum class TensorKind : uint8_t { kMatrix, kBias, kNorm };

struct ModelTensor {
  std::string name;  // with its suffix: "lm_head.weight"
  std::vector<int64_t> shape;
  TensorKind kind = TensorKind::kMatrix;
};

/// Every tensor that an unquantized checkpoint of this model has, in the order of the layers: what
/// load_model() asks for, neither more nor less.
[[nodiscard]] std::vector<ModelTensor> list_tensors(const ModelConfig& config);

}  // namespace nibble
