#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "arch/tensors.h"
#include "base/status.h"
#include "checkpoint/turned_inputs.h"
#include "quantizer/algorithms/rotation.h"

namespace nibble {

/// What becomes of a tensor [n, k] (of a vector, a bias too: n = 1, its numbers are columns):
/// columns are put into another order, multiplied by factors, then rotated; rows likewise, but
/// rotated before they are multiplied.
struct TensorFold {
  bool becomes_ones = false;          // and nothing else
  std::vector<int32_t> column_order;  // column i is the old one column_order[i]; or empty. Of n * k
                                      // numbers: of all, row after row
  std::vector<int32_t> row_order;     // likewise [n]
  std::vector<float> column_factors;  // [k], or empty
  const Rotation* column_rotation = nullptr;  // of neighbouring columns, as often as it fits
  int64_t column_turn = 0;                    // or turned in blocks of so many: turn_blocks()
  const Rotation* row_rotation = nullptr;     // likewise of rows
  std::vector<float> row_factors;             // [n], or empty
};

/// Orders of channels: channel i becomes the old one at [i]. Empty where they stay.
struct ChannelOrders {
  struct Layer {
    std::vector<int32_t> values;                // [kv_heads * head_dim], within each head
    std::vector<int32_t> down;                  // [intermediate], or those of the expert that every
                                                // token takes
    std::vector<std::vector<int32_t>> experts;  // of each routed one [width]
  };
  std::vector<int32_t> stream;  // [hidden]: of the residual stream
  std::vector<Layer> layers;
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
  /// The inputs that are to be turned while the changed model runs.
  [[nodiscard]] virtual std::vector<TurnedInputs> turned_inputs(
      const ModelConfig& /*config*/) const {
    return {};
  }
};

/// Rotates the residual stream and, within each head of keys and values, the values; gains of the
/// norms before products are multiplied into these and become 1. kUnsupported for a model whose
/// norms take the mean away, or with learned positions or latent attention.
Result<std::unique_ptr<ModelTransform>> make_rotation(const ModelConfig& config, uint64_t seed);

/// Turns what down multiplies in dense MLPs and in experts that every token takes: columns of down
/// by turn_blocks() in the largest blocks that a power of two allows, inputs by GemmInput::turn.
/// Where the activation is linear in up, signs (hadamard_flips()) go in front by way of up.
/// kUnsupported for a model without such MLPs, or with an odd width of theirs.
Result<std::unique_ptr<ModelTransform>> make_turn(const ModelConfig& config);

/// Puts channels into other orders.
std::unique_ptr<ModelTransform> make_permutation(const ModelConfig& config, ChannelOrders orders);

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
