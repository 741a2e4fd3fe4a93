#include "model/latent_check.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "arch/family.h"
#include "base/log.h"
#include "model/further_layers.h"

namespace nibble {
namespace {

constexpr std::string_view kRemedy =
    "download all files of the checkpoint, or take the config.json that belongs to it";

/// Walks over the layers of one model.
class LatentCheck final {
 public:
  LatentCheck(const CheckpointReader& reader, const ModelConfig& config)
      : reader_(reader), config_(config), latent_(config.latent) {}

  Status run() {
    for (layer_ = 0; layer_ < config_.num_layers; ++layer_) {
      NIBBLE_RETURN_IF_ERROR(check_queries());
      NIBBLE_RETURN_IF_ERROR(check_keys_and_values());
      if (config_.moe.correction && has_experts(config_, layer_)) {
        NIBBLE_RETURN_IF_ERROR(check_correction());
      }
    }
    warn();
    return {};
  }

 private:
  /// What a matrix must be, and the fields that say so.
  struct Expected {
    int64_t rows = 0;
    int64_t columns = 0;
    std::string fields;
  };

  [[nodiscard]] std::string name(Role role) const {
    return module_name(*config_.family, role, layer_);
  }

  /// The tensor that has the codes or numbers of a module, in any form.
  [[nodiscard]] const TensorInfo* stored(const std::string& module) const {
    for (const std::string_view suffix : {".weight", ".weight_packed", ".qweight"}) {
      if (const TensorInfo* tensor = reader_.find(module + std::string(suffix))) {
        return tensor;
      }
    }
    return nullptr;
  }

  [[nodiscard]] Status check_queries() const {
    const std::string whole = name(Role::kQuery);
    const std::string down = name(Role::kQueryDown);
    const std::string up = name(Role::kQueryUp);
    const int64_t width = config_.num_heads * latent_.query_dim();
    const std::string of_heads =
        fmt::format("num_attention_heads {} x (qk_nope_head_dim {} + qk_rope_head_dim {})",
                    config_.num_heads, latent_.nope_dim, latent_.rope_dim);
    if (latent_.q_rank == 0) {
      const TensorInfo* half = stored(down) != nullptr ? stored(down) : stored(up);
      if (half != nullptr) {
        return make_error(
            StatusCode::kCorrupt,
            "{}: queries are stored in two stages, but config.json: field q_lora_rank "
            "is absent or null; set it to the rows of {}",
            reader_.where(*half), down);
      }
      return check_matrix(whole, {width, config_.hidden_size, of_heads});
    }
    if (const TensorInfo* one = stored(whole); one != nullptr && stored(down) == nullptr) {
      return make_error(
          StatusCode::kCorrupt,
          "{}: queries are stored in one stage, but config.json: field q_lora_rank is "
          "{}; set it to null",
          reader_.where(*one), latent_.q_rank);
    }
    NIBBLE_RETURN_IF_ERROR(check_pair(down, up, Role::kQueryDownNorm));
    NIBBLE_RETURN_IF_ERROR(check_matrix(down, {latent_.q_rank, config_.hidden_size,
                                               fmt::format("q_lora_rank {}", latent_.q_rank)}));
    return check_matrix(up, {width, latent_.q_rank, of_heads});
  }

  [[nodiscard]] Status check_keys_and_values() const {
    const std::string down = name(Role::kLatentDown);
    const std::string up = name(Role::kLatentUp);
    NIBBLE_RETURN_IF_ERROR(check_pair(down, up, Role::kLatentNorm));
    NIBBLE_RETURN_IF_ERROR(check_matrix(down, {latent_.row_dim(), config_.hidden_size,
                                               fmt::format("kv_lora_rank {} + qk_rope_head_dim {}",
                                                           latent_.kv_rank, latent_.rope_dim)}));
    NIBBLE_RETURN_IF_ERROR(check_matrix(
        up, {config_.num_heads * (latent_.nope_dim + latent_.value_dim), latent_.kv_rank,
             fmt::format("num_attention_heads {} x (qk_nope_head_dim {} + v_head_dim {})",
                         config_.num_heads, latent_.nope_dim, latent_.value_dim)}));
    return check_matrix(name(Role::kAttentionOutput),
                        {config_.hidden_size, config_.num_heads * latent_.value_dim,
                         fmt::format("hidden_size {}", config_.hidden_size)});
  }

  /// Both matrices of a pair and the norm between them.
  [[nodiscard]] Status check_pair(const std::string& down, const std::string& up, Role norm) const {
    const TensorInfo* first = stored(down);
    const TensorInfo* second = stored(up);
    const TensorInfo* between = reader_.find(name(norm) + ".weight");
    if (first != nullptr && second != nullptr && between != nullptr) {
      return {};
    }
    const std::string missing = first == nullptr    ? down + ".weight"
                                : second == nullptr ? up + ".weight"
                                                    : name(norm) + ".weight";
    const TensorInfo* there = first != nullptr ? first : second;
    if (there == nullptr) {
      return make_error(StatusCode::kNotFound, "{}: has no tensor {}; {}", reader_.path(), missing,
                        kRemedy);
    }
    return make_error(StatusCode::kNotFound, "{}: its counterpart {} is missing; {}",
                      reader_.where(*there), missing, kRemedy);
  }

  /// The shape of plain numbers and FP8 codes, and the rows of words along them.
  [[nodiscard]] Status check_matrix(const std::string& module, const Expected& expected) const {
    const TensorInfo* tensor = stored(module);
    if (tensor == nullptr) {
      return make_error(StatusCode::kNotFound, "{}: has no tensor {}.weight; {}", reader_.path(),
                        module, kRemedy);
    }
    const bool elements = tensor->dtype != DType::kI32 && tensor->dtype != DType::kU8;
    const bool by_columns = tensor->name.ends_with(".qweight");
    if (tensor->blocks != nullptr || by_columns || tensor->shape.size() != 2) {
      return {};  // what reads this form checks it
    }
    if (tensor->shape[0] != expected.rows) {
      return make_error(StatusCode::kCorrupt,
                        "{}: {} rows, but config.json says {} = {}; correct the field that does "
                        "not fit, or take the config.json that belongs to the checkpoint",
                        reader_.where(*tensor), tensor->shape[0], expected.fields, expected.rows);
    }
    if (elements && tensor->shape[1] != expected.columns) {
      return make_error(StatusCode::kCorrupt,
                        "{}: shape {}, but config.json needs [{}, {}]; correct the field that does "
                        "not fit, or take the config.json that belongs to the checkpoint",
                        reader_.where(*tensor), shape_text(tensor->shape), expected.rows,
                        expected.columns);
    }
    return {};
  }

  Status check_correction() {
    const std::string tensor = name(Role::kRouterCorrection);
    const TensorInfo* info = reader_.find(tensor);
    if (info == nullptr) {
      return make_error(StatusCode::kNotFound,
                        "{}: has no tensor {}, by which experts are chosen; {}", reader_.path(),
                        tensor, kRemedy);
    }
    if (info->shape != std::vector<int64_t>{config_.moe.experts}) {
      return make_error(StatusCode::kCorrupt,
                        "{}: shape {}, but config.json: field n_routed_experts is {}; correct it, "
                        "or take the config.json that belongs to the checkpoint",
                        reader_.where(*info), shape_text(info->shape), config_.moe.experts);
    }
    if (info->dtype == DType::kBF16 || info->dtype == DType::kF16) {
      rounded_ = rounded_ == nullptr ? info : rounded_;
    } else if (info->dtype != DType::kF32) {
      return make_error(StatusCode::kUnsupported,
                        "{}: stored as {}; corrections are read in F32, BF16 and F16: take it from "
                        "the published checkpoint",
                        reader_.where(*info), info->type_name());
    }
    return {};
  }

  void warn() const {
    if (rounded_ != nullptr) {
      NIBBLE_LOG(kWarning,
                 "{}: stored as {}, where corrections are published in F32: close ones have become "
                 "equal, so that other experts are chosen than by the model that was trained; take "
                 "them from the published checkpoint",
                 reader_.where(*rounded_), rounded_->type_name());
    }
  }

  const CheckpointReader& reader_;
  const ModelConfig& config_;
  const LatentConfig& latent_;
  int64_t layer_ = 0;
  const TensorInfo* rounded_ = nullptr;  // the first correction that is not F32
};

}  // namespace

Status check_latent_tensors(const CheckpointReader& reader, const ModelConfig& config) {
  if (config.latent.kv_rank == 0) {
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(LatentCheck(reader, config).run());
  return check_further_layers(reader, config);
}

}  // namespace nibble
