#include "arch/families/families.h"

namespace nibble {

namespace {

// Qwen 1.5, 2 and 2.5 dense: q, k and v have biases, without a field that says so.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  config.qkv_bias = true;
  NIBBLE_ASSIGN_OR_RETURN(config.sliding_windows,
                          read_qwen_windows(json, reader, config.num_layers));
  return {};
}

}  // namespace

const Family kQwen2 = {.name = "qwen2",
                       .architecture = "Qwen2ForCausalLM",
                       .model_type = "qwen2",
                       .read_fields = read_fields,
                       .gguf = GgufForm{.architecture = "qwen2"}};

}  // namespace nibble
