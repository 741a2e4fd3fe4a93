#include "arch/families/families.h"

namespace nibble {

namespace {

// Qwen3 with experts: attention as in the dense models.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  config.qk_norm = true;
  NIBBLE_ASSIGN_OR_RETURN(const bool attention_bias, reader.optional_bool("attention_bias", false));
  config.qkv_bias = attention_bias;
  config.output_bias = attention_bias;
  NIBBLE_ASSIGN_OR_RETURN(config.sliding_windows,
                          read_qwen_windows(json, reader, config.num_layers));
  return read_qwen_experts(json, reader, config);
}

}  // namespace

const Family kQwen3Moe = {.name = "qwen3_moe",
                          .architecture = "Qwen3MoeForCausalLM",
                          .model_type = "qwen3_moe",
                          .read_fields = read_fields,
                          .fused = FusedExperts{}};

}  // namespace nibble
