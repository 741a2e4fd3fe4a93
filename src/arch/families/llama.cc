#include "arch/families/families.h"

namespace nibble {

namespace {

// Llama 1, 2, 3, 3.1 and 3.2: biases are options, every layer attends to everything.
Status read_fields(const Json&, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_ASSIGN_OR_RETURN(const bool attention_bias, reader.optional_bool("attention_bias", false));
  NIBBLE_ASSIGN_OR_RETURN(config.mlp_bias, reader.optional_bool("mlp_bias", false));
  config.qkv_bias = attention_bias;
  config.output_bias = attention_bias;
  return {};
}

}  // namespace

// Llama 1 has no num_key_value_heads.
const Family kLlama = {.name = "llama",
                       .architecture = "LlamaForCausalLM",
                       .model_type = "llama",
                       .read_fields = read_fields,
                       .kv_heads_may_be_absent = true,
                       .gguf = GgufForm{.architecture = "llama", .paired_rows = true}};

}  // namespace nibble
