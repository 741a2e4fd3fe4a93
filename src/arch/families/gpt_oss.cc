#include <array>

#include "arch/families/families.h"

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

}  // namespace

const Family kGptOss = {
    .name = "gpt_oss",
    .architecture = "GptOssForCausalLM",
    .model_type = "gpt_oss",
    .read_fields = read_fields,
    .names = kNames,
    .default_dtype = DType::kBF16,  // which the published files have and their config.json omits
    .fused = FusedExperts{.transposed = true, .interleaved = true, .published = true},
    .worth = WorthQuantizing::kRoutedExperts};

}  // namespace nibble
