#pragma once

#include <optional>

#include "base/json.h"
#include "base/status.h"
#include "core/dtype.h"

namespace nibble {

/// What config.json says about the type that a model computes in: field "dtype", called
/// "torch_dtype" before transformers 5; the new name counts where both are there. Empty when
/// neither is, or they are null. Another value is kUnsupported, or kCorrupt when it is no text, by
/// name.
Result<std::optional<DType>> read_dtype_field(const Json& config, const JsonReader& reader);

}  // namespace nibble
