#include "arch/families/families.h"

namespace nibble {

namespace {

// Qwen3 with experts: attention as in the dense models.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_RETURN_IF_ERROR(kQwen3.read_fields(json, reader, config));
  return read_qwen_experts(json, reader, config);
}

}  // namespace

const Family kQwen3Moe = {.name = "qwen3_moe",
                          .architecture = "Qwen3MoeForCausalLM",
                          .model_type = "qwen3_moe",
                          .read_fields = read_fields,
                          .fused = FusedExperts{},
                          .gguf = GgufForm{.architecture = "qwen3moe", .experts = true}};

}  // namespace nibble
