#include <array>

#include "arch/families/families.h"

namespace nibble {

namespace {

// StarCoder2 3B to 15B: LayerNorm, an MLP without a gate, biases everywhere; one window for every
// layer, none if the field is null.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_ASSIGN_OR_RETURN(const bool biases, reader.optional_bool("use_bias", true));
  config.qkv_bias = biases;
  config.output_bias = biases;
  config.mlp_bias = biases;
  NIBBLE_ASSIGN_OR_RETURN(config.tie_word_embeddings,
                          reader.optional_bool("tie_word_embeddings", true));
  NIBBLE_ASSIGN_OR_RETURN(config.sliding_windows,
                          read_one_window(json, reader, config.num_layers, 0));
  config.norm = NormKind::kLayer;
  config.activation = GemmInput::Kind::kGeluTanh;
  return {};
}

constexpr std::array kNames = {
    RoleName{Role::kUp, "model.layers.{}.mlp.c_fc"},
    RoleName{Role::kDown, "model.layers.{}.mlp.c_proj"},
};

}  // namespace

const Family kStarcoder2 = {.name = "starcoder2",
                            .architecture = "Starcoder2ForCausalLM",
                            .model_type = "starcoder2",
                            .read_fields = read_fields,
                            .names = kNames,
                            .hidden_act = "gelu_pytorch_tanh",
                            .eps_field = "norm_epsilon",
                            .default_eps = 1e-5};

}  // namespace nibble
