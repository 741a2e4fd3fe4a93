#include <array>

#include "arch/families/families.h"

namespace nibble {

namespace {

// Qwen 1.5 and 2 with experts: attention as in the dense models, and one expert that every token
// takes, as much of it as a gate says.
Status read_fields(const Json& json, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_RETURN_IF_ERROR(kQwen2.read_fields(json, reader, config));
  NIBBLE_RETURN_IF_ERROR(read_qwen_experts(json, reader, config));
  NIBBLE_ASSIGN_OR_RETURN(config.moe.shared_width,
                          read_count(reader, "shared_expert_intermediate_size"));
  config.moe.shared_gate = true;
  return {};
}

constexpr std::array kNames = {
    RoleName{Role::kSharedGate, "model.layers.{}.mlp.shared_expert.gate_proj"},
    RoleName{Role::kSharedUp, "model.layers.{}.mlp.shared_expert.up_proj"},
    RoleName{Role::kSharedDown, "model.layers.{}.mlp.shared_expert.down_proj"},
};

}  // namespace

const Family kQwen2Moe = {.name = "qwen2_moe",
                          .architecture = "Qwen2MoeForCausalLM",
                          .model_type = "qwen2_moe",
                          .read_fields = read_fields,
                          .names = kNames,
                          .fused = FusedExperts{},
                          .gguf = GgufForm{.architecture = "qwen2moe", .experts = true}};

}  // namespace nibble
