#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "model/config.h"

namespace nibble {

/// What one family of models has to itself; everything else is shared. One row per file of archs/.
struct Architecture {
  std::string_view name;  // as in config.json's "architectures"
  /// Reads the family's own fields of config.json. The shared ones are already in `config`.
  Status (*read_fields)(const Json& json, const JsonReader& reader, ModelConfig& config);
};

extern const Architecture kLlamaArchitecture;
extern const Architecture kMistralArchitecture;
extern const Architecture kQwen2Architecture;
extern const Architecture kQwen3Architecture;

/// kUnsupported with the list of known names.
Result<const Architecture*> find_architecture(std::string_view name, std::string_view where);

/// The rule of Qwen2 and Qwen3: layer_types says which layers have a window; without it those from
/// max_window_layers on, if use_sliding_window. One entry per layer, 0 for full attention.
Result<std::vector<int64_t>> read_qwen_windows(const Json& json,
                                               const JsonReader& reader,
                                               int64_t num_layers);

/// Rotation parameters: rope_parameters of transformers 5, or rope_scaling and rope_theta of
/// transformers 4. kUnsupported names a type or field that this build cannot honour.
Result<RopeConfig> read_rope_config(const Json& json,
                                    const JsonReader& reader,
                                    int64_t max_position);

}  // namespace nibble
