#include "arch/tensors.h"

#include <utility>

#include "arch/family.h"

namespace nibble {

namespace {

enum class Bias : uint8_t { kNone, kStored };

Bias stored_if(bool condition) { return condition ? Bias::kStored : Bias::kNone; }

/// Walks through a model; members hold where it is.
class TensorLister final {
 public:
  explicit TensorLister(const ModelConfig& config) : config_(config), hidden_(config.hidden_size) {}

  std::vector<ModelTensor> list() {
    matrix(Role::kEmbedding, config_.vocab_size, hidden_);
    if (config_.learned_positions) {
      matrix(Role::kPositions, config_.max_position + config_.first_position, hidden_);
    }
    for (layer_ = 0; layer_ < config_.num_layers; ++layer_) {
      norm(Role::kAttentionNorm, hidden_);
      config_.latent.kv_rank > 0 ? list_latent_attention() : list_attention();
      norm(Role::kMlpNorm, hidden_);
      has_experts(config_, layer_) ? list_experts() : list_mlp();
    }
    norm(Role::kFinalNorm, hidden_);
    if (!config_.tie_word_embeddings) {
      matrix(Role::kHead, config_.vocab_size, hidden_);
    }
    return std::move(tensors_);
  }

 private:
  [[nodiscard]] std::string module(Role role) const {
    return module_name(*config_.family, role, layer_, expert_);
  }

  void add(Role role, const char* suffix, std::vector<int64_t> shape, TensorKind kind) {
    std::string name = module(role);
    tensors_.push_back({name, name + suffix, std::move(shape), kind, role, layer_, expert_});
  }

  void norm(Role role, int64_t size) {
    add(role, ".weight", {size}, TensorKind::kNorm);
    if (config_.norm == NormKind::kLayer) {
      add(role, ".bias", {size}, TensorKind::kBias);
    }
  }

  void other(Role role, std::vector<int64_t> shape) {
    add(role, "", std::move(shape), TensorKind::kOther);
  }

  void matrix(Role role, int64_t n, int64_t k, Bias bias = Bias::kNone) {
    add(role, ".weight", {n, k}, TensorKind::kMatrix);
    if (bias == Bias::kStored) {
      add(role, ".bias", {n}, TensorKind::kBias);
    }
  }

  void list_attention() {
    const int64_t q_width = config_.num_heads * config_.head_dim;
    const int64_t kv_width = config_.num_kv_heads * config_.head_dim;
    const Bias bias = stored_if(config_.qkv_bias);
    matrix(Role::kQuery, q_width, hidden_, bias);
    matrix(Role::kKey, kv_width, hidden_, bias);
    matrix(Role::kValue, kv_width, hidden_, bias);
    matrix(Role::kAttentionOutput, hidden_, q_width, stored_if(config_.output_bias));
    if (config_.qk_norm) {
      norm(Role::kQueryNorm, config_.head_dim);
      norm(Role::kKeyNorm, config_.head_dim);
    }
    if (config_.sinks) {
      other(Role::kSinks, {config_.num_heads});
    }
  }

  void list_latent_attention() {
    const LatentConfig& latent = config_.latent;
    const int64_t heads = config_.num_heads;
    const int64_t q_width = heads * (latent.nope_dim + latent.rope_dim);
    if (latent.q_rank > 0) {
      matrix(Role::kQueryDown, latent.q_rank, hidden_);
      norm(Role::kQueryDownNorm, latent.q_rank);
      matrix(Role::kQueryUp, q_width, latent.q_rank);
    } else {
      matrix(Role::kQuery, q_width, hidden_);
    }
    matrix(Role::kLatentDown, latent.kv_rank + latent.rope_dim, hidden_);
    norm(Role::kLatentNorm, latent.kv_rank);
    matrix(Role::kLatentUp, heads * (latent.nope_dim + latent.value_dim), latent.kv_rank);
    matrix(Role::kAttentionOutput, hidden_, heads * latent.value_dim);
  }

  void list_mlp() {
    const Bias bias = stored_if(config_.mlp_bias);
    if (has_gate(config_.activation)) {
      matrix(Role::kGate, config_.intermediate_size, hidden_, bias);
    }
    matrix(Role::kUp, config_.intermediate_size, hidden_, bias);
    matrix(Role::kDown, hidden_, config_.intermediate_size, bias);
  }

  void list_experts() {
    const MoeConfig& moe = config_.moe;
    matrix(Role::kRouter, moe.experts, hidden_, stored_if(moe.biases));
    if (moe.correction) {
      other(Role::kRouterCorrection, {moe.experts});
    }
    if (moe.shared_width > 0) {
      matrix(Role::kSharedGate, moe.shared_width, hidden_);
      matrix(Role::kSharedUp, moe.shared_width, hidden_);
      matrix(Role::kSharedDown, hidden_, moe.shared_width);
    }
    if (moe.shared_gate) {
      matrix(Role::kSharedExpertGate, 1, hidden_);
    }
    if (moe.biases) {
      other(Role::kExpertsGateUpBias, {moe.experts, 2 * moe.width});
      other(Role::kExpertsDownBias, {moe.experts, hidden_});
    }
    for (expert_ = 0; expert_ < moe.experts; ++expert_) {
      matrix(Role::kExpertGate, moe.width, hidden_);
      matrix(Role::kExpertUp, moe.width, hidden_);
      matrix(Role::kExpertDown, hidden_, moe.width);
    }
  }

  const ModelConfig& config_;
  const int64_t hidden_;
  int64_t layer_ = 0;
  int64_t expert_ = 0;
  std::vector<ModelTensor> tensors_;
};

}  // namespace

std::vector<ModelTensor> list_tensors(const ModelConfig& config) {
  return TensorLister(config).list();
}

}  // namespace nibble
