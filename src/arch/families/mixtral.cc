#include <array>

#include "arch/families/families.h"

namespace nibble {

namespace {

// Mixtral 8x7B and 8x22B: every layer has experts of the width of an MLP.
Status read_fields(const Json&, const JsonReader& reader, ModelConfig& config) {
  NIBBLE_ASSIGN_OR_RETURN(config.moe.experts, read_count(reader, "num_local_experts"));
  NIBBLE_ASSIGN_OR_RETURN(config.moe.experts_per_token,
                          read_count(reader, "num_experts_per_tok", 2));
  config.moe.width = config.intermediate_size;
  config.moe.router.renormalise = true;
  config.moe.layers.assign(static_cast<size_t>(config.num_layers), true);
  return {};
}

constexpr std::array kNames = {
    RoleName{Role::kRouter, "model.layers.{}.block_sparse_moe.gate"},
    RoleName{Role::kExpertGate, "model.layers.{}.block_sparse_moe.experts.{}.w1"},
    RoleName{Role::kExpertUp, "model.layers.{}.block_sparse_moe.experts.{}.w3"},
    RoleName{Role::kExpertDown, "model.layers.{}.block_sparse_moe.experts.{}.w2"},
};

}  // namespace

const Family kMixtral = {
    .name = "mixtral",
    .architecture = "MixtralForCausalLM",
    .model_type = "mixtral",
    .read_fields = read_fields,
    .names = kNames,
    .fused = FusedExperts{},
    .gguf = GgufForm{.architecture = "llama", .paired_rows = true, .experts = true}};

}  // namespace nibble
