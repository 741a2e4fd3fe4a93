#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "quant/kv_formats.h"

namespace nibble {

/// Whether a tensor of this name is a scale of a cache's keys or values.
[[nodiscard]] bool is_kv_scale(std::string_view tensor);

/// What a checkpoint says of the cache of one layer.
struct StoredKvScales {
  std::optional<KvScales> scales;          // none: nothing is stored
  std::vector<const TensorInfo*> tensors;  // that say it, and the scales of queries and weights of
};                                         // attention, which stay as they are and need none

/// Reads the scales of an FP8 cache, as llm-compressor, ModelOpt and Quark store them.
///   key, value: the layer's projections, "model.layers.7.self_attn.k_proj"
/// For keys that is k_scale of self_attn, of self_attn.attn or of k_proj, or k_proj.output_scale;
/// kv_scale of self_attn is that of both. Of one element, in F32, F16 or BF16. kCorrupt for a
/// number that is not positive, for one of the two without the other, and for two names of the same
/// scale; kUnsupported for a scale of each head.
Result<StoredKvScales> read_kv_scales(const CheckpointReader& reader,
                                      std::string_view key,
                                      std::string_view value);

}  // namespace nibble
