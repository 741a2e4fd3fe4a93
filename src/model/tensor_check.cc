#include "model/tensor_check.h"

#include <algorithm>
#include <array>
#include <unordered_map>
#include <unordered_set>

#include "arch/family.h"
#include "arch/model_text.h"
#include "arch/tensors.h"
#include "base/file.h"
#include "base/json.h"
#include "checkpoint/kv_scales.h"
#include "checkpoint/source_matrix.h"
#include "model/latent_check.h"
#include "model/weight_loader.h"

namespace nibble {
namespace {

bool predicts_further_tokens(std::string_view name, const ModelConfig& config) {
  if (name.starts_with("mtp.") || name.starts_with("model.mtp.")) {
    return true;
  }
  for (int64_t further = 0; further < config.num_further_layers; ++further) {
    if (name.starts_with(layer_prefix(*config.family, config.num_layers + further))) {
      return true;
    }
  }
  return false;
}

bool all_zero(const TensorInfo& tensor) {
  return std::all_of(tensor.data.begin(), tensor.data.end(),
                     [](std::byte value) { return value == std::byte{}; });
}

/// Parameters of activations, which say nothing about a weight.
bool is_activation_scale(std::string_view name) {
  static constexpr std::array<std::string_view, 5> kSuffixes = {
      ".input_scale", ".activation_scale", ".input_zero_point", ".output_scale", ".q_scale"};
  return std::any_of(kSuffixes.begin(), kSuffixes.end(),
                     [&](std::string_view suffix) { return name.ends_with(suffix); });
}

/// Ticks off what a model needs against what a checkpoint stores.
class TensorCheck final {
 public:
  TensorCheck(const CheckpointReader& reader, const SourceModel& stored, const ModelConfig& config)
      : reader_(reader), config_(config) {
    for (const auto& matrix : stored.matrices) {
      matrices_.emplace(matrix->module(), matrix.get());
    }
  }

  Status run() {
    for (const ModelTensor& tensor : list_tensors(config_)) {
      NIBBLE_RETURN_IF_ERROR(tensor.kind == TensorKind::kMatrix ? check_matrix(tensor)
                                                                : check_vector(tensor));
    }
    const std::string head = module_name(*config_.family, Role::kHead);
    if (config_.tie_word_embeddings && matrices_.contains(head)) {
      NIBBLE_RETURN_IF_ERROR(check_matrix({.module = head,
                                           .name = head + ".weight",
                                           .shape = {config_.vocab_size, config_.hidden_size},
                                           .role = Role::kHead}));
    }
    NIBBLE_RETURN_IF_ERROR(check_kv_scales());
    return check_rest();
  }

 private:
  Status check_kv_scales() {
    for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
      NIBBLE_ASSIGN_OR_RETURN(
          const StoredKvScales stored,
          read_kv_scales(reader_, module_name(*config_.family, Role::kKey, layer),
                         module_name(*config_.family, Role::kValue, layer)));
      read_.insert(stored.tensors.begin(), stored.tensors.end());
    }
    return {};
  }

  Status check_matrix(const ModelTensor& tensor) {
    const auto found = matrices_.find(tensor.module);
    if (found == matrices_.end()) {
      NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* other, reader_.require(tensor.name));
      return misfit(reader_.where(*other), other->shape, tensor.shape);
    }
    const SourceMatrix& matrix = *found->second;
    if (matrix.n() != tensor.shape[0] || matrix.k() != tensor.shape[1]) {
      return misfit(matrix.where(), {matrix.n(), matrix.k()}, tensor.shape);
    }
    read_.insert(matrix.tensors().begin(), matrix.tensors().end());
    return {};
  }

  Status check_vector(const ModelTensor& tensor) {
    NIBBLE_ASSIGN_OR_RETURN(const TensorInfo* info, reader_.require(tensor.name));
    if (info->shape != tensor.shape) {
      return misfit(reader_.where(*info), info->shape, tensor.shape);
    }
    read_.insert(info);
    return {};
  }

  static Status misfit(std::string_view where,
                       const std::vector<int64_t>& shape,
                       const std::vector<int64_t>& needed) {
    return make_error(StatusCode::kCorrupt, "{}: shape {}, but config.json needs {}", where,
                      shape_text(shape), shape_text(needed));
  }

  [[nodiscard]] Status check_rest() const {
    for (const TensorInfo* tensor : reader_.tensors()) {
      if (!read_.contains(tensor) && !is_activation_scale(tensor->name) &&
          !may_stay_unread(*tensor, config_)) {
        return unread_error(reader_, *tensor);
      }
    }
    return {};
  }

  const CheckpointReader& reader_;
  const ModelConfig& config_;
  std::unordered_map<std::string_view, const SourceMatrix*> matrices_;
  std::unordered_set<const TensorInfo*> read_;
};

}  // namespace

bool may_stay_unread(const TensorInfo& tensor, const ModelConfig& config) {
  return is_rope_frequencies(tensor.name) || predicts_further_tokens(tensor.name, config) ||
         of_another_model(*config.family, tensor.name) ||
         (tensor.name.ends_with(".bias") && all_zero(tensor));
}

Status unread_error(const CheckpointReader& reader, const TensorInfo& tensor) {
  return make_error(StatusCode::kUnsupported,
                    "{}: config.json describes a model without this tensor; the architecture "
                    "or a field such as attention_bias or num_hidden_layers does not fit",
                    reader.where(tensor));
}

Status check_model_tensors(const std::string& model_dir) {
  if (!has_config(model_dir)) {
    return {};
  }
  auto config = load_model_config(model_dir);
  if (config.status().code() == StatusCode::kUnsupported) {
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(config.status());
  NIBBLE_ASSIGN_OR_RETURN(const Json json, read_config_json(model_dir));
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader reader, CheckpointReader::open(model_dir));
  NIBBLE_ASSIGN_OR_RETURN(const SourceModel stored, list_source_matrices(reader, json));
  config->family = family_as_stored(
      config->family, [&](std::string_view name) { return reader.find(name) != nullptr; });
  NIBBLE_RETURN_IF_ERROR(check_latent_tensors(reader, *config));
  return TensorCheck(reader, stored, *config).run();
}

Status check_loadable(const std::string& model_dir) {
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig config, load_model_config(model_dir));
  NIBBLE_ASSIGN_OR_RETURN(WeightLoader weights, WeightLoader::open(model_dir, config));
  for (const ModelTensor& tensor : list_tensors(weights.config())) {
    if (tensor.role == Role::kEmbedding || tensor.role == Role::kPositions) {
      NIBBLE_RETURN_IF_ERROR(
          weights.table(tensor.module, tensor.shape[0], tensor.shape[1]).status());
    } else if (of_a_routed_expert(tensor.role)) {
      const WeightLoader::ExpertModule expert{tensor.module, tensor.shape[0], tensor.shape[1]};
      NIBBLE_RETURN_IF_ERROR(weights.experts({&expert, 1}).status());
    } else if (tensor.kind == TensorKind::kMatrix && tensor.role != Role::kSharedExpertGate) {
      NIBBLE_RETURN_IF_ERROR(
          weights.linear(tensor.module, tensor.shape[0], tensor.shape[1]).status());
    } else {
      NIBBLE_RETURN_IF_ERROR(weights.numbers(tensor.name, tensor.shape).status());
    }
  }
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    NIBBLE_RETURN_IF_ERROR(weights.kv_scales(layer).status());
  }
  NIBBLE_RETURN_IF_ERROR(weights.head_module().status());
  return weights.check_all_used();
}

}  // namespace nibble
