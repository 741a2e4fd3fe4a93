#include "model/tensor_list.h"

#include <utility>

#include "model/weight_map.h"

namespace nibble {

namespace {

enum class Bias : uint8_t { kNone, kStored };

class TensorLister final {
 public:
  explicit TensorLister(const ModelConfig& config) : config_(config) {}

  std::vector<ModelTensor> list() {
    matrix(kEmbeddingModule, config_.vocab_size, config_.hidden_size, Bias::kNone);
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      norm(layer_module(layer, kAttentionNorm), config_.hidden_size);
      list_attention(layer);
      norm(layer_module(layer, kMlpNorm), config_.hidden_size);
      list_mlp(layer);
    }
    norm(kFinalNormModule, config_.hidden_size);
    if (!config_.tie_word_embeddings) {
      matrix(kHeadModule, config_.vocab_size, config_.hidden_size, Bias::kNone);
    }
    return std::move(tensors_);
  }

 private:
  void norm(const std::string& module, int64_t size) {
    tensors_.push_back({module + ".weight", {size}, TensorKind::kNorm});
  }

  void matrix(const std::string& module, int64_t n, int64_t k, Bias bias) {
    tensors_.push_back({module + ".weight", {n, k}, TensorKind::kMatrix});
    if (bias == Bias::kStored) {
      tensors_.push_back({module + ".bias", {n}, TensorKind::kBias});
    }
  }

  void list_attention(int64_t layer) {
    const int64_t hidden = config_.hidden_size;
    const int64_t q_width = config_.num_heads * config_.head_dim;
    const int64_t kv_width = config_.num_kv_heads * config_.head_dim;
    const Bias qkv_bias = config_.qkv_bias ? Bias::kStored : Bias::kNone;
    matrix(layer_module(layer, kQueryProjection), q_width, hidden, qkv_bias);
    matrix(layer_module(layer, kKeyProjection), kv_width, hidden, qkv_bias);
    matrix(layer_module(layer, kValueProjection), kv_width, hidden, qkv_bias);
    matrix(layer_module(layer, kAttentionOutput), hidden, q_width,
           config_.output_bias ? Bias::kStored : Bias::kNone);
    if (config_.qk_norm) {
      norm(layer_module(layer, kQueryNorm), config_.head_dim);
      norm(layer_module(layer, kKeyNorm), config_.head_dim);
    }
  }

  void list_mlp(int64_t layer) {
    const int64_t hidden = config_.hidden_size;
    const int64_t width = config_.intermediate_size;
    const Bias bias = config_.mlp_bias ? Bias::kStored : Bias::kNone;
    matrix(layer_module(layer, kGateProjection), width, hidden, bias);
    matrix(layer_module(layer, kUpProjection), width, hidden, bias);
    matrix(layer_module(layer, kDownProjection), hidden, width, bias);
  }

  const ModelConfig& config_;
  std::vector<ModelTensor> tensors_;
};

}  // namespace

std::vector<ModelTensor> list_tensors(const ModelConfig& config) {
  return TensorLister(config).list();
}

}  // namespace nibble
