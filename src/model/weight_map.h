#pragma once

#include <cstdint>
#include <string>

#include <fmt/core.h>

namespace nibble {

/// Module names in the checkpoint. The four dense families share them.
inline constexpr const char* kEmbeddingModule = "model.embed_tokens";
inline constexpr const char* kFinalNormModule = "model.norm";
inline constexpr const char* kHeadModule = "lm_head";
inline constexpr const char* kHeadPrefix = "lm_head.";

/// Modules of a layer.
inline constexpr const char* kAttentionNorm = "input_layernorm";
inline constexpr const char* kQueryProjection = "self_attn.q_proj";
inline constexpr const char* kKeyProjection = "self_attn.k_proj";
inline constexpr const char* kValueProjection = "self_attn.v_proj";
inline constexpr const char* kAttentionOutput = "self_attn.o_proj";
inline constexpr const char* kQueryNorm = "self_attn.q_norm";
inline constexpr const char* kKeyNorm = "self_attn.k_norm";
inline constexpr const char* kMlpNorm = "post_attention_layernorm";
inline constexpr const char* kGateProjection = "mlp.gate_proj";
inline constexpr const char* kUpProjection = "mlp.up_proj";
inline constexpr const char* kDownProjection = "mlp.down_proj";

/// "model.layers.7.mlp.up_proj" from 7 and "mlp.up_proj".
inline std::string layer_module(int64_t layer, const char* name) {
  return fmt::format("model.layers.{}.{}", layer, name);
}

}  // namespace nibble
