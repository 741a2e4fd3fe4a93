#include "calibration/model_transform.h"

#include <optional>
#include <utility>

#include "arch/family.h"
#include "base/f16.h"
#include "calibration/stream_roles.h"

namespace nibble {
namespace {

class RotateTransform final : public ModelTransform {
 public:
  RotateTransform(const ModelConfig& config, uint64_t seed)
      : config_(config), stream_(config.hidden_size, seed), values_(config.head_dim, seed + 1) {}

  [[nodiscard]] bool unties_head() const override { return true; }

  Result<TensorFold> fold_of(const ModelTensor& tensor, const Vectors& vectors) const override {
    TensorFold fold;
    const Role role = tensor.role;
    const bool bias = tensor.kind == TensorKind::kBias || role == Role::kExpertsDownBias;
    if (is_norm_of_stream(role)) {
      fold.becomes_ones = true;
      return fold;
    }
    if (const auto norm = norm_before(role); norm && !bias) {
      NIBBLE_ASSIGN_OR_RETURN(fold.column_factors,
                              vectors(module_name(*config_.family, *norm, tensor.layer) + ".weight",
                                      config_.hidden_size));
      fold.column_rotation = &stream_;
    }
    if (role == Role::kEmbedding || role == Role::kExpertsDownBias) {
      fold.column_rotation = &stream_;
    }
    if (role == Role::kValue) {
      (bias ? fold.column_rotation : fold.row_rotation) = &values_;
    }
    if (adds_to_stream(role)) {
      (bias ? fold.column_rotation : fold.row_rotation) = &stream_;
    }
    if (role == Role::kAttentionOutput && !bias) {
      fold.column_rotation = &values_;
    }
    return fold;
  }

 private:
  const ModelConfig config_;
  Rotation stream_;
  Rotation values_;
};

std::vector<float> inverse(std::vector<float> factors) {
  for (float& factor : factors) {
    factor = 1.0F / factor;
  }
  return factors;
}

class ScalingTransform final : public ModelTransform {
 public:
  ScalingTransform(const ModelConfig& config, std::vector<LayerFactors> factors)
      : config_(config), factors_(std::move(factors)) {}

  [[nodiscard]] bool unties_head() const override { return false; }

  Result<TensorFold> fold_of(const ModelTensor& tensor, const Vectors& vectors) const override {
    TensorFold fold;
    const Role role = tensor.role;
    if (role == Role::kEmbedding || role == Role::kFinalNorm || role == Role::kHead ||
        role == Role::kPositions) {
      return fold;
    }
    const LayerFactors& factors = factors_[static_cast<size_t>(tensor.layer)];
    const bool bias = tensor.kind == TensorKind::kBias;
    const bool attention = role == Role::kAttentionNorm || role == Role::kQuery ||
                           role == Role::kKey || role == Role::kValue;
    const bool norm = role == Role::kAttentionNorm || role == Role::kMlpNorm;
    const bool reads_norm =
        !bias && (attention || role == Role::kGate || role == Role::kUp) && !norm;
    if (norm || reads_norm) {
      NIBBLE_ASSIGN_OR_RETURN(
          fold.column_factors,
          through_norm({attention ? factors.qkv : factors.up,
                        attention ? Role::kAttentionNorm : Role::kMlpNorm, tensor.layer},
                       vectors));
      fold.column_factors = norm ? inverse(fold.column_factors) : fold.column_factors;
    }
    if (role == Role::kAttentionOutput && !bias) {
      fold.column_factors = by_query_head(factors.values);
    }
    if (role == Role::kDown && !bias) {
      fold.column_factors = factors.down;
    }
    if (role == Role::kValue || role == Role::kUp) {
      (bias ? fold.column_factors : fold.row_factors) =
          inverse(role == Role::kValue ? factors.values : factors.down);
    }
    return fold;
  }

 private:
  struct NormFactors {
    const std::vector<float>& factors;
    Role norm;
    int64_t layer;
  };

  /// What the norm's channels are divided by: the factors, but for the rounding of its gains.
  [[nodiscard]] Result<std::vector<float>> through_norm(const NormFactors& wanted,
                                                        const Vectors& vectors) const {
    std::vector<float> factors = wanted.factors;
    if (factors.empty()) {
      return factors;
    }
    NIBBLE_ASSIGN_OR_RETURN(
        const std::vector<float> gains,
        vectors(module_name(*config_.family, wanted.norm, wanted.layer) + ".weight",
                config_.hidden_size));
    for (size_t i = 0; i < factors.size(); ++i) {
      const float gain = rounded(gains[i] / factors[i]);
      factors[i] = gain == 0 ? factors[i] : gains[i] / gain;
    }
    return factors;
  }

  [[nodiscard]] float rounded(float x) const {
    return config_.dtype == DType::kBF16  ? bf16_to_f32(f32_to_bf16(x))
           : config_.dtype == DType::kF16 ? f16_to_f32(f32_to_f16(x))
                                          : x;
  }

  /// Those of a head of values, for each head of queries that reads it.
  [[nodiscard]] std::vector<float> by_query_head(const std::vector<float>& values) const {
    std::vector<float> factors;
    const int64_t group = config_.num_heads / config_.num_kv_heads;
    for (int64_t head = 0; !values.empty() && head < config_.num_heads; ++head) {
      const float* from = values.data() + head / group * config_.head_dim;
      factors.insert(factors.end(), from, from + config_.head_dim);
    }
    return factors;
  }

  const ModelConfig config_;
  std::vector<LayerFactors> factors_;
};

}  // namespace

Result<std::unique_ptr<ModelTransform>> make_rotation(const ModelConfig& config, uint64_t seed) {
  const char* reason = nullptr;
  if (config.norm == NormKind::kLayer) {
    reason = "its norms take the mean of a row away";
  } else if (config.learned_positions) {
    reason = "it adds learned positions to its embeddings";
  } else if (config.latent.kv_rank > 0) {
    reason = "its attention is of latent rows";
  }
  if (reason != nullptr) {
    return make_error(StatusCode::kUnsupported,
                      "method rotate cannot be applied to {}: {}; leave rotate out",
                      config.architecture, reason);
  }
  return std::unique_ptr<ModelTransform>(std::make_unique<RotateTransform>(config, seed));
}

std::unique_ptr<ModelTransform> make_scaling(const ModelConfig& config,
                                             std::vector<LayerFactors> factors) {
  return std::make_unique<ScalingTransform>(config, std::move(factors));
}

}  // namespace nibble
