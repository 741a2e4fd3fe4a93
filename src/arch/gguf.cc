#include "arch/gguf.h"

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include <fmt/core.h>

#include "arch/llama3_rope.h"

namespace nibble {
namespace {

constexpr std::string_view kFrequencies = "rope_freqs.weight";
constexpr int64_t kLastLayer = 99999;  // that a name can have

// What GGUF files call the modules, whatever the family.
constexpr std::array kGgufNames = {
    RoleName{Role::kEmbedding, "token_embd"},
    RoleName{Role::kFinalNorm, "output_norm"},
    RoleName{Role::kHead, "output"},
    RoleName{Role::kAttentionNorm, "blk.{}.attn_norm"},
    RoleName{Role::kQuery, "blk.{}.attn_q"},
    RoleName{Role::kKey, "blk.{}.attn_k"},
    RoleName{Role::kValue, "blk.{}.attn_v"},
    RoleName{Role::kAttentionOutput, "blk.{}.attn_output"},
    RoleName{Role::kQueryNorm, "blk.{}.attn_q_norm"},
    RoleName{Role::kKeyNorm, "blk.{}.attn_k_norm"},
    RoleName{Role::kMlpNorm, "blk.{}.ffn_norm"},
    RoleName{Role::kGate, "blk.{}.ffn_gate"},
    RoleName{Role::kUp, "blk.{}.ffn_up"},
    RoleName{Role::kDown, "blk.{}.ffn_down"},
    RoleName{Role::kRouter, "blk.{}.ffn_gate_inp"},
    RoleName{Role::kSharedGate, "blk.{}.ffn_gate_shexp"},
    RoleName{Role::kSharedUp, "blk.{}.ffn_up_shexp"},
    RoleName{Role::kSharedDown, "blk.{}.ffn_down_shexp"},
    RoleName{Role::kSharedExpertGate, "blk.{}.ffn_gate_inp_shexp"},
    RoleName{Role::kExpertGate, "blk.{}.ffn_gate_exps"},
    RoleName{Role::kExpertUp, "blk.{}.ffn_up_exps"},
    RoleName{Role::kExpertDown, "blk.{}.ffn_down_exps"},
};

// A module of a family by GGUF's name of it, such as "blk.7.ffn_up".
struct GgufModule {
  Role role;
  int64_t layer;
};
std::optional<GgufModule> find_module(const Family& family, std::string_view module) {
  for (const std::span<const RoleName> names :
       {family.gguf->names, std::span<const RoleName>(kGgufNames)}) {
    for (const RoleName& row : names) {
      const auto layer = number_of(row.module, module);
      if (layer && *layer <= kLastLayer &&
          fmt::format(fmt::runtime(row.module), *layer) == module) {
        return GgufModule{row.role, *layer};
      }
    }
  }
  return std::nullopt;
}

// The bias of a projection of all experts of a layer.
GgufTensor bias_of_experts(const Family& family, const GgufModule& module) {
  using enum GateUpPart;
  const bool down = module.role == Role::kExpertDown;
  return {.name = module_name(family, down ? Role::kExpertsDownBias : Role::kExpertsGateUpBias,
                              module.layer),
          .gate_up = down                               ? kNone
                     : module.role == Role::kExpertGate ? kGate
                                                        : kUp};
}

/// Reads the keys of one architecture and writes the fields of config.json.
class ConfigBuilder {
 public:
  ConfigBuilder(const gguf::FileSet& model, const Family& family)
      : model_(model), metadata_(model.metadata()), family_(family) {}

  Result<Json> build() {
    config_ = Json::object(
        {{"architectures", JsonArray{family_.architecture}}, {"model_type", family_.model_type}});
    NIBBLE_RETURN_IF_ERROR(add_sizes());
    if (family_.gguf->experts) {
      NIBBLE_RETURN_IF_ERROR(add_experts());
    }
    NIBBLE_RETURN_IF_ERROR(add_rope());
    NIBBLE_RETURN_IF_ERROR(family_.gguf->add_fields != nullptr
                               ? family_.gguf->add_fields(metadata_, config_)
                               : refuse_windows());
    config_.set("hidden_act", "silu");
    config_.set("tie_word_embeddings", model_.find("output.weight") == nullptr);
    config_.set("torch_dtype", dtype());
    return std::move(config_);
  }

 private:
  [[nodiscard]] std::string key(std::string_view name) const {
    return fmt::format("{}.{}", family_.gguf->architecture, name);
  }

  // Under the names of every family that has experts; each reads its own.
  Status add_experts() {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t experts, metadata_.require_count(key("expert_count")));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t used, metadata_.require_count(key("expert_used_count")));
    const int64_t dense = config_.find("intermediate_size")->as_int();
    NIBBLE_ASSIGN_OR_RETURN(const int64_t width,
                            metadata_.optional_count(key("expert_feed_forward_length"), dense));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t shared,
                            metadata_.optional_count(key("expert_shared_feed_forward_length"), 0));
    config_.set("num_experts", experts);
    config_.set("num_local_experts", experts);
    config_.set("num_experts_per_tok", used);
    config_.set("moe_intermediate_size", width);
    config_.set("shared_expert_intermediate_size", shared);
    JsonArray dense_layers;
    for (int64_t layer = 0; layer < config_.find("num_hidden_layers")->as_int(); ++layer) {
      if (model_.find(fmt::format("blk.{}.ffn_gate_inp.weight", layer)) == nullptr) {
        dense_layers.emplace_back(layer);
      }
    }
    config_.set("mlp_only_layers", std::move(dense_layers));
    // The files do not say: published models of Qwen 3 divide weights by their sum, of Qwen 2 not.
    config_.set("norm_topk_prob", family_.gguf->architecture == "qwen3moe");
    return {};
  }

  // A window would change what is computed, and the files do not say which layers have it.
  Status refuse_windows() const {
    const std::string name = key("attention.sliding_window");
    NIBBLE_ASSIGN_OR_RETURN(const int64_t window, metadata_.optional_count(name, 0));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t context, metadata_.require_count(key("context_length")));
    return window == 0 || window >= context
               ? Status()
               : metadata_.unsupported(name,
                                       fmt::format("{}: windows are not read from GGUF files; "
                                                   "use the model's Hugging Face folder",
                                                   window));
  }

  Status add_sizes() {
    for (const auto& [name, field] : {std::pair("embedding_length", "hidden_size"),
                                      {"feed_forward_length", "intermediate_size"},
                                      {"block_count", "num_hidden_layers"},
                                      {"attention.head_count", "num_attention_heads"},
                                      {"context_length", "max_position_embeddings"}}) {
      NIBBLE_ASSIGN_OR_RETURN(const int64_t value, metadata_.require_count(key(name)));
      config_.set(field, value);
    }
    if (const int64_t layers = config_.find("num_hidden_layers")->as_int(); layers > kLastLayer) {
      return metadata_.corrupt(key("block_count"), fmt::format("{} layers", layers));
    }
    const int64_t heads = config_.find("num_attention_heads")->as_int();
    NIBBLE_ASSIGN_OR_RETURN(const int64_t kv_heads,
                            metadata_.optional_count(key("attention.head_count_kv"), heads));
    config_.set("num_key_value_heads", kv_heads);
    if (heads < 1) {
      return metadata_.corrupt(key("attention.head_count"), fmt::format("{} heads", heads));
    }
    NIBBLE_ASSIGN_OR_RETURN(
        head_dim_, metadata_.optional_count(key("attention.key_length"),
                                            config_.find("hidden_size")->as_int() / heads));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t value_dim,
                            metadata_.optional_count(key("attention.value_length"), head_dim_));
    NIBBLE_ASSIGN_OR_RETURN(const int64_t rotated,
                            metadata_.optional_count(key("rope.dimension_count"), head_dim_));
    if (value_dim != head_dim_ || rotated != head_dim_) {
      return metadata_.unsupported(key("rope.dimension_count"),
                                   fmt::format("heads of {} with values of {}, of which {} are "
                                               "rotated; all three must be equal",
                                               head_dim_, value_dim, rotated));
    }
    config_.set("head_dim", head_dim_);
    NIBBLE_ASSIGN_OR_RETURN(const double epsilon,
                            metadata_.require_float(key("attention.layer_norm_rms_epsilon")));
    config_.set("rms_norm_eps", shortest(epsilon));
    const gguf::Tensor* table = model_.find("token_embd.weight");
    if (table == nullptr || table->shape.empty()) {
      return make_error(StatusCode::kNotFound,
                        "{}: has no tensor token_embd.weight; it holds a vocabulary or an adapter, "
                        "no model",
                        metadata_.where());
    }
    config_.set("vocab_size", table->shape.front());
    return {};
  }

  // The decimal that an F32 was written as.
  static double shortest(double value) {
    return std::stod(fmt::format("{}", static_cast<float>(value)));
  }

  Status add_rope() {
    NIBBLE_ASSIGN_OR_RETURN(const double theta,
                            metadata_.optional_float(key("rope.freq_base"), 10000.0));
    config_.set("rope_theta", shortest(theta));
    const std::string type_key = key("rope.scaling.type");
    NIBBLE_ASSIGN_OR_RETURN(const std::string_view type,
                            metadata_.optional_string(type_key, "none"));
    NIBBLE_ASSIGN_OR_RETURN(const double linear,
                            metadata_.optional_float(key("rope.scale_linear"), 1.0));
    NIBBLE_ASSIGN_OR_RETURN(const double factor,
                            metadata_.optional_float(key("rope.scaling.factor"), linear));
    const gguf::Tensor* frequencies = model_.find(kFrequencies);
    const bool plain = (type == "none" || type == "linear") && factor == 1.0;
    if (frequencies != nullptr) {
      return plain ? add_llama3(*frequencies, theta)
                   : metadata_.unsupported(type_key,
                                           fmt::format("\"{}\" beside {}", type, kFrequencies));
    }
    if (plain) {
      return {};
    }
    if (type == "linear" || (type == "none" && linear != 1.0)) {
      config_.set("rope_scaling", Json::object({{"rope_type", "linear"}, {"factor", factor}}));
      return {};
    }
    if (type == "yarn") {
      return add_yarn(factor);
    }
    return metadata_.unsupported(
        type_key, fmt::format("\"{}\" with factor {} is not known to this build; none, linear and "
                              "yarn are",
                              type, factor));
  }

  Status add_yarn(double factor) {
    NIBBLE_ASSIGN_OR_RETURN(const int64_t original,
                            metadata_.require_count(key("rope.scaling.original_context_length")));
    NIBBLE_ASSIGN_OR_RETURN(const double attention,
                            metadata_.optional_float(key("rope.scaling.attn_factor"), 1.0));
    if (attention != 1.0) {
      return metadata_.unsupported(key("rope.scaling.attn_factor"),
                                   fmt::format("{} is not supported, only 1", attention));
    }
    config_.set("rope_scaling", Json::object({{"rope_type", "yarn"},
                                              {"factor", shortest(factor)},
                                              {"original_max_position_embeddings", original}}));
    return {};
  }

  // Llama 3.1 and on: the file has what each frequency is divided by, which follows from four
  // numbers, of which three are the same in all published models.
  Status add_llama3(const gguf::Tensor& tensor, double theta) {
    const auto pairs = static_cast<size_t>(head_dim_ / 2);
    std::vector<float> stored(pairs);
    if (tensor.type != gguf::Type::kF32 || tensor.data.size() != pairs * sizeof(float)) {
      return wrong_frequencies(fmt::format("expected F32 [{}]", pairs));
    }
    std::memcpy(stored.data(), tensor.data.data(), tensor.data.size());
    const RopeConfig rope{.factor = stored.empty() ? 1.0 : static_cast<double>(stored.back()),
                          .low_freq_factor = 1.0,
                          .high_freq_factor = 4.0,
                          .original_max_position = 8192};
    for (size_t i = 0; i < pairs; ++i) {
      const double exponent = 2.0 * static_cast<double>(i) / static_cast<double>(head_dim_);
      const double plain = std::pow(theta, -exponent);
      const double expected = plain / llama3_frequency(plain, rope);
      if (!(std::abs(static_cast<double>(stored[i]) - expected) <= 1e-3 * expected)) {
        return wrong_frequencies(
            fmt::format("number {} is {}; the rule of Llama 3 with factor {}, {}, {} and {} "
                        "positions gives {}, and no other rule is known",
                        i, stored[i], rope.factor, rope.low_freq_factor, rope.high_freq_factor,
                        rope.original_max_position, expected));
      }
    }
    config_.set("rope_scaling",
                Json::object({{"rope_type", "llama3"},
                              {"factor", rope.factor},
                              {"low_freq_factor", rope.low_freq_factor},
                              {"high_freq_factor", rope.high_freq_factor},
                              {"original_max_position_embeddings", rope.original_max_position}}));
    return {};
  }

  [[nodiscard]] Status wrong_frequencies(std::string_view what) const {
    return make_error(StatusCode::kCorrupt, "{}: {}: {}", metadata_.where(), kFrequencies, what);
  }

  // Of the matrices: what activations are rounded to. Quantized models were BF16 or are as good.
  [[nodiscard]] std::string_view dtype() const {
    bool f16 = false, f32 = true;
    for (const gguf::Part& part : model_.parts()) {
      for (const gguf::Tensor& tensor : part.content.tensors()) {
        if (tensor.shape.size() > 1) {
          f16 = f16 || tensor.type == gguf::Type::kF16;
          f32 = f32 && tensor.type == gguf::Type::kF32;
        }
      }
    }
    return f32 ? "float32" : f16 ? "float16" : "bfloat16";
  }

  const gguf::FileSet& model_;
  const gguf::Metadata& metadata_;
  const Family& family_;
  Json config_;
  int64_t head_dim_ = 0;
};

}  // namespace

Result<const Family*> gguf_family(const gguf::Metadata& metadata) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string_view architecture,
                          metadata.require_string("general.architecture"));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t experts,
                          metadata.optional_count(fmt::format("{}.expert_count", architecture), 0));
  return find_gguf_family(architecture, experts > 0 ? GgufExperts::kSome : GgufExperts::kNone,
                          metadata.where());
}

Result<Json> gguf_config(const gguf::FileSet& model) {
  NIBBLE_ASSIGN_OR_RETURN(const Family* family, gguf_family(model.metadata()));
  return ConfigBuilder(model, *family).build();
}

Result<Json> gguf_generation_config(const gguf::Metadata& metadata) {
  Json generation = Json::object({});
  NIBBLE_ASSIGN_OR_RETURN(const int64_t bos,
                          metadata.optional_count("tokenizer.ggml.bos_token_id", -1));
  if (bos >= 0) {
    generation.set("bos_token_id", bos);
  }
  JsonArray ends;
  for (const std::string_view name : {"eos", "eot", "eom"}) {
    NIBBLE_ASSIGN_OR_RETURN(
        const int64_t id,
        metadata.optional_count(fmt::format("tokenizer.ggml.{}_token_id", name), -1));
    bool known = id < 0;
    for (const Json& end : ends) {
      known = known || end.as_int() == id;
    }
    if (!known) {
      ends.emplace_back(id);
    }
  }
  if (!ends.empty()) {
    generation.set("eos_token_id", std::move(ends));
  }
  return generation;
}

Result<std::optional<GgufTensor>> gguf_tensor(const Family& family,
                                              const gguf::Metadata& metadata,
                                              std::string_view name) {
  if (name == kFrequencies) {
    return std::optional<GgufTensor>();
  }
  const size_t dot = name.rfind('.');
  const std::string_view suffix = dot == std::string_view::npos ? "" : name.substr(dot);
  const std::string_view module = name.substr(0, dot);
  const auto found = find_module(family, module);
  if (!found || (suffix != ".weight" && suffix != ".bias")) {
    return make_error(StatusCode::kUnsupported,
                      "{}: tensor {}: no part of {} has this name; the file belongs to another "
                      "kind of model, or is newer than this build",
                      metadata.where(), name, family.name);
  }
  const Role role = found->role;
  const int64_t layer = found->layer;
  const bool is_bias = suffix == ".bias";
  if (of_a_routed_expert(role) && is_bias) {
    return family.gguf->expert_biases
               ? Result<std::optional<GgufTensor>>(bias_of_experts(family, *found))
               : make_error(StatusCode::kUnsupported,
                            "{}: tensor {}: biases of experts are not read of {}", metadata.where(),
                            name, family.name);
  }
  GgufTensor tensor{.name = module_name(family, role, layer),
                    .is_row = role == Role::kSharedExpertGate};
  if (of_a_routed_expert(role)) {
    tensor.name.clear();
    tensor.of_expert = [&family, role, layer](int64_t expert) {
      return module_name(family, role, layer, expert) + ".weight";
    };
  } else if (role != Role::kSinks) {  // a parameter without a module
    tensor.name += suffix;
  }
  if (family.gguf->paired_rows && (role == Role::kQuery || role == Role::kKey)) {
    if (is_bias) {
      return make_error(StatusCode::kUnsupported, "{}: tensor {}: biases of {} are not read",
                        metadata.where(), name, family.name);
    }
    const std::string all = fmt::format("{}.attention.head_count", family.gguf->architecture);
    NIBBLE_ASSIGN_OR_RETURN(tensor.paired_heads, metadata.require_count(all));
    if (role == Role::kKey) {
      NIBBLE_ASSIGN_OR_RETURN(tensor.paired_heads,
                              metadata.optional_count(all + "_kv", tensor.paired_heads));
    }
  }
  return std::optional<GgufTensor>(std::move(tensor));
}

}  // namespace nibble
