#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "arch/family.h"
#include "base/json.h"
#include "base/status.h"
#include "gguf/split.h"

namespace nibble {

/// The family of the models that a file says it holds one of. kUnsupported for an architecture that
/// this build does not know, kCorrupt.
Result<const Family*> gguf_family(const gguf::Metadata& metadata);
/// The config.json that says what the metadata of a GGUF file says of the model. Errors name file
/// and key or tensor: kUnsupported (an architecture, a rotation or another fact that this build
/// does not know), kCorrupt (keys that contradict each other), kNotFound.
Result<Json> gguf_config(const gguf::FileSet& model);
/// The generation_config.json likewise: tokens that begin and end. kCorrupt for what is no token.
Result<Json> gguf_generation_config(const gguf::Metadata& metadata);

/// What a tensor is of one that has gate and up of all experts in turns.
enum class GateUpPart : uint8_t { kNone, kGate, kUp };

/// A tensor of a GGUF file as a Hugging Face checkpoint has it.
struct GgufTensor {
  std::string name;                        // "model.layers.7.mlp.up_proj.weight"
  int64_t paired_heads = 0;                // heads whose rows lie in pairs (GgufForm); 0: none
  bool is_row = false;                     // a vector here, a matrix of one row there
  GateUpPart gate_up = GateUpPart::kNone;  // here two tensors, there one: `name`
  // Of a tensor [experts, n, k] of all experts of a layer, which has no name of its own: the name
  // of one expert's matrix; else empty.
  std::function<std::string(int64_t expert)> of_expert;
};

/// nullopt for a tensor that says something of the config (frequencies of the rotation).
/// kUnsupported, naming it, for one that no role explains.
///   family: gguf_family() of the metadata
Result<std::optional<GgufTensor>> gguf_tensor(const Family& family,
                                              const gguf::Metadata& metadata,
                                              std::string_view name);

}  // namespace nibble
