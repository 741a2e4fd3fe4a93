#pragma once

#include "base/status.h"
#include "checkpoint/safetensors.h"
#include "gguf/file.h"

namespace nibble {

/// The tensors of a GGUF file (one of a split set, whose first has the metadata) by their names in
/// Hugging Face checkpoints, but for those that say something of the config. Errors: those of
/// gguf_tensor(), kUnsupported for a type that no checkpoint has.
Result<SafetensorsContent> list_gguf_tensors(const gguf::Metadata& metadata,
                                             const gguf::Content& content);

}  // namespace nibble
