#pragma once

#include <cstdint>
#include <string_view>

#include "arch/role.h"

namespace nibble {

/// What a matrix is for.
enum class ModuleKind : uint8_t {
  kLinear,
  kRoutedExpert,  // mlp.experts.N.*, block_sparse_moe.experts.N.*
  kRouter,
  kNorm,
  kEmbedding,
  kHead,        // lm_head and other classifiers
  kPrediction,  // heads and layers that predict further tokens (MTP)
  kState,       // A_log, conv1d: state-space parts
  kVision,
};

/// What a module of a known family is for.
[[nodiscard]] ModuleKind kind_of(Role role);

/// The same judged by the words in a name, for families that are not known.
/// hidden_layers: layers of the model itself; "layers.N" from there on predicts further tokens. 0:
/// unknown.
[[nodiscard]] ModuleKind module_kind(std::string_view module, int64_t hidden_layers);
/// "a router", for messages.
[[nodiscard]] std::string_view kind_name(ModuleKind kind);
/// Kinds that only --include may quantize: doing it by a broad pattern is a mistake.
[[nodiscard]] bool is_protected(ModuleKind kind);

/// "up_proj" of "model.layers.0.mlp.up_proj".
[[nodiscard]] std::string_view last_component(std::string_view module);
/// What stands before it, without the dot.
[[nodiscard]] std::string_view parent_module(std::string_view module);

}  // namespace nibble
