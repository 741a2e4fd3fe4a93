#include "model/architecture.h"

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

const Architecture kQwen2Architecture = {"Qwen2ForCausalLM", read_fields};

}  // namespace nibble
