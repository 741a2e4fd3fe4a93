#include "arch/families/families.h"

namespace nibble {

namespace {

// Qwen3 dense: heads of q and k are normalized before the rotation; biases are an option.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  config.qk_norm = true;
  NIBBLE_ASSIGN_OR_RETURN(const bool attention_bias, reader.optional_bool("attention_bias", false));
  config.qkv_bias = attention_bias;
  config.output_bias = attention_bias;
  NIBBLE_ASSIGN_OR_RETURN(config.sliding_windows,
                          read_qwen_windows(json, reader, config.num_layers));
  return {};
}

}  // namespace

const Family kQwen3 = {.name = "qwen3",
                       .architecture = "Qwen3ForCausalLM",
                       .model_type = "qwen3",
                       .read_fields = read_fields,
                       .default_head_dim = 128,
                       .gguf = GgufForm{.architecture = "qwen3"}};

}  // namespace nibble
