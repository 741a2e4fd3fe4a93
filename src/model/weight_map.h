#pragma once

#include <cstdint>
#include <string>

#include <fmt/core.h>

namespace nibble {

/// Module names in the checkpoint. The four dense families share them.
inline constexpr const char* kEmbeddingModule = "model.embed_tokens";
inline constexpr const char* kFinalNormModule = "model.norm";
inline constexpr const char* kHeadModule = "lm_head";

/// "model.layers.7.mlp.up_proj" from 7 and "mlp.up_proj".
inline std::string layer_module(int64_t layer, const char* name) {
  return fmt::format("model.layers.{}.{}", layer, name);
}

}  // namespace nibble
