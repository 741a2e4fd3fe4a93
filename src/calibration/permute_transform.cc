#include <utility>

#include "arch/family.h"
#include "calibration/model_transform.h"
#include "calibration/stream_roles.h"

namespace nibble {
namespace {

/// Whether the columns of a role's matrix are channels of the residual stream.
bool reads_stream(Role role) {
  return role == Role::kEmbedding || role == Role::kPositions || norm_before(role).has_value();
}

class PermuteTransform final : public ModelTransform {
 public:
  PermuteTransform(const ModelConfig& config, ChannelOrders orders)
      : config_(config), orders_(std::move(orders)) {}

  [[nodiscard]] bool unties_head() const override { return false; }

  Result<TensorFold> fold_of(const ModelTensor& tensor, const Vectors&) const override {
    TensorFold fold;
    const Role role = tensor.role;
    if (is_norm_of_stream(role) || role == Role::kExpertsDownBias) {
      fold.column_order = orders_.stream;
      return fold;
    }
    const bool bias = tensor.kind == TensorKind::kBias;
    std::vector<int32_t>& rows = bias ? fold.column_order : fold.row_order;
    if (reads_stream(role) && !bias) {
      fold.column_order = orders_.stream;
    }
    if (adds_to_stream(role)) {
      rows = orders_.stream;
    }
    if (role != Role::kEmbedding && role != Role::kPositions && role != Role::kHead) {
      within_layer(tensor, bias, rows, fold);
    }
    return fold;
  }

 private:
  void within_layer(const ModelTensor& tensor,
                    bool bias,
                    std::vector<int32_t>& rows,
                    TensorFold& fold) const {
    const ChannelOrders::Layer& layer = orders_.layers[static_cast<size_t>(tensor.layer)];
    switch (tensor.role) {
      case Role::kValue:
        rows = layer.values;
        break;
      case Role::kAttentionOutput:
        fold.column_order = bias ? fold.column_order : by_query_head(layer.values);
        break;
      case Role::kGate:
      case Role::kUp:
      case Role::kSharedGate:
      case Role::kSharedUp:
        rows = layer.down;
        break;
      case Role::kDown:
      case Role::kSharedDown:
        fold.column_order = bias ? fold.column_order : layer.down;
        break;
      case Role::kExpertGate:
      case Role::kExpertUp:
        rows = of_expert(layer, tensor.expert);
        break;
      case Role::kExpertDown:
        fold.column_order = of_expert(layer, tensor.expert);
        break;
      case Role::kExpertsGateUpBias:
        fold.column_order = of_biases(layer);
        break;
      default:
        break;
    }
  }

  static std::vector<int32_t> of_expert(const ChannelOrders::Layer& layer, int64_t expert) {
    return layer.experts.empty() ? std::vector<int32_t>()
                                 : layer.experts[static_cast<size_t>(expert)];
  }

  /// Those of a head of values, for each head of queries that reads it.
  [[nodiscard]] std::vector<int32_t> by_query_head(const std::vector<int32_t>& values) const {
    std::vector<int32_t> order;
    const int64_t group = config_.num_heads / config_.num_kv_heads;
    for (int64_t head = 0; !values.empty() && head < config_.num_heads; ++head) {
      const int64_t of_values = head / group * config_.head_dim;
      const auto moved = static_cast<int32_t>(head * config_.head_dim - of_values);
      for (int64_t i = 0; i < config_.head_dim; ++i) {
        order.push_back(values[static_cast<size_t>(of_values + i)] + moved);
      }
    }
    return order;
  }

  /// Of a tensor [experts, 2 width] of gate's and up's, which lie in halves or in turns.
  [[nodiscard]] std::vector<int32_t> of_biases(const ChannelOrders::Layer& layer) const {
    const bool in_turns = config_.family->fused && config_.family->fused->interleaved;
    const auto width = static_cast<int32_t>(config_.moe.width);
    std::vector<int32_t> order;
    for (size_t expert = 0; expert < layer.experts.size(); ++expert) {
      const auto first = static_cast<int32_t>(expert) * 2 * width;
      const std::vector<int32_t>& own = layer.experts[expert];
      for (int32_t i = 0; i < 2 * width; ++i) {
        const int32_t channel = own[static_cast<size_t>(in_turns ? i / 2 : i % width)];
        order.push_back(first + (in_turns ? 2 * channel + i % 2 : i / width * width + channel));
      }
    }
    return order;
  }

  const ModelConfig config_;
  ChannelOrders orders_;
};

}  // namespace

std::unique_ptr<ModelTransform> make_permutation(const ModelConfig& config, ChannelOrders orders) {
  return std::make_unique<PermuteTransform>(config, std::move(orders));
}

}  // namespace nibble
