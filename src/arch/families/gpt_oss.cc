#include <array>

#include "arch/families/families.h"
#include "gguf/metadata.h"

namespace nibble {

namespace {

// gpt-oss: every projection has a bias, every head a sink, every layer experts; windows alternate.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  config.qkv_bias = true;
  config.output_bias = true;
  config.sinks = true;
  NIBBLE_ASSIGN_OR_RETURN(config.sliding_windows,
                          read_layer_windows(json, reader, config.num_layers));
  NIBBLE_ASSIGN_OR_RETURN(config.moe.experts, read_count(reader, "num_local_experts"));
  NIBBLE_ASSIGN_OR_RETURN(config.moe.experts_per_token,
                          read_count(reader, "num_experts_per_tok", 4));
  config.moe.width = config.intermediate_size;
  config.moe.biases = true;
  config.moe.router.scores = RouterScores::kSoftmaxOfChosen;
  config.activation = GemmInput::Kind::kClampedSwiglu;
  NIBBLE_ASSIGN_OR_RETURN(const double limit, reader.optional_double("swiglu_limit", 7.0));
  if (!(limit > 0.0 && limit < 1e30)) {
    return make_error(StatusCode::kCorrupt, "{}: field swiglu_limit: {} must be positive",
                      reader.where(), limit);
  }
  config.moe.limit = static_cast<float>(limit);
  config.moe.layers.assign(static_cast<size_t>(config.num_layers), true);
  return {};
}

constexpr std::array kNames = {RoleName{Role::kRouter, "model.layers.{}.mlp.router"}};

constexpr std::array kGgufNames = {RoleName{Role::kMlpNorm, "blk.{}.post_attention_norm"},
                                   RoleName{Role::kSinks, "blk.{}.attn_sinks"}};

// Which layers have the window, and how the rotation is stretched, is the same in all models.
Status add_gguf_fields(const gguf::Metadata& metadata, Json& config) {
  NIBBLE_ASSIGN_OR_RETURN(const int64_t window,
                          metadata.require_count("gpt-oss.attention.sliding_window"));
  config.set("sliding_window", window);
  if (const Json* scaling = config.find("rope_scaling")) {
    Json smooth = *scaling;
    smooth.set("truncate", false);
    config.set("rope_scaling", std::move(smooth));
  }
  return {};
}

}  // namespace

const Family kGptOss = {
    .name = "gpt_oss",
    .architecture = "GptOssForCausalLM",
    .model_type = "gpt_oss",
    .read_fields = read_fields,
    .names = kNames,
    .default_dtype = DType::kBF16,  // which the published files have and their config.json omits
    .fused = FusedExperts{.transposed = true, .interleaved = true, .published = true},
    .worth = WorthQuantizing::kRoutedExperts,
    .gguf = GgufForm{.architecture = "gpt-oss",
                     .names = kGgufNames,
                     .experts = true,
                     .expert_biases = true,
                     .add_fields = add_gguf_fields}};

}  // namespace nibble
