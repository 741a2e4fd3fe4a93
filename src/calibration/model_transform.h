#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "arch/tensors.h"
#include "base/status.h"
#include "quantizer/algorithms/rotation.h"

namespace nibble {

/// What becomes of a tensor [n, k] (of a vector: n = 1, its numbers are columns): columns are
/// multiplied by factors, then rotated; rows are rotated, then multiplied by factors. Of a bias,
/// which belongs to rows, see TensorFold::of_rows.
struct TensorFold {
  bool becomes_ones = false;                  // and nothing else
  std::vector<float> column_factors;          // [k], or empty
  const Rotation* column_rotation = nullptr;  // of neighbouring columns, as often as it fits
  const Rotation* row_rotation = nullptr;     // likewise of rows
  std::vector<float> row_factors;             // [n], or empty

  [[nodiscard]] bool changes() const {
    return becomes_ones || column_rotation != nullptr || row_rotation != nullptr ||
           !column_factors.empty() || !row_factors.empty();
  }
};

/// A change of all weights of a model that leaves what it computes as it is.
class ModelTransform {
 public:
  /// Numbers of one of the model's vectors.
  using Vectors = std::function<Result<std::vector<float>>(const std::string& tensor, int64_t n)>;

  virtual ~ModelTransform() = default;
  /// Whether the head must be a matrix of its own, apart from the embeddings.
  [[nodiscard]] virtual bool unties_head() const = 0;
  virtual Result<TensorFold> fold_of(const ModelTensor& tensor, const Vectors& vectors) const = 0;
};

/// Rotates the residual stream and, within each head of keys and values, the values; gains of the
/// norms before products are multiplied into these and become 1. kUnsupported for a model whose
/// norms take the mean away, or with learned positions or latent attention.
Result<std::unique_ptr<ModelTransform>> make_rotation(const ModelConfig& config, uint64_t seed);

/// What the channels that enter a layer's products are divided by, and the weights multiplied by.
/// Empty where they stay.
struct LayerFactors {
  std::vector<float> qkv;     // [hidden]
  std::vector<float> values;  // [kv_heads * head_dim]: those that the output of attention reads
  std::vector<float> up;      // [hidden]: of gate and up
  std::vector<float> down;    // [intermediate]
};

/// factors: by layer. Gains of norms are rounded to the model's type, and the weights that read
/// them take what that changes, too.
std::unique_ptr<ModelTransform> make_scaling(const ModelConfig& config,
                                             std::vector<LayerFactors> factors);

}  // namespace nibble
