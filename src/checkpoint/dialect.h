#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "quant/scheme.h"

namespace nibble {

/// Whose way of storing quantized weights a checkpoint follows, in tensors and config.json. Each is
/// one file and one row of dialects/; all are read, some are written.
enum class Dialect : uint8_t {
  kNone,
  kCompressedTensors,  // vllm-project/compressed-tensors
  kGptq,
  kAwq,
  kFp8,  // DeepSeek and transformers
  kMxfp4,
  kQuark,  // AMD
  kModelOpt,
};

/// A dialect that is written, by its name. kInvalidArgument with the list of names.
Result<Dialect> parse_dialect(std::string_view name);
[[nodiscard]] std::string_view dialect_name(Dialect dialect);
/// The dialect that a scheme is written in unless another is asked for.
[[nodiscard]] Dialect default_dialect(const QuantScheme& scheme);
/// kUnsupported, naming those that can, when a dialect has no way to store a scheme. Unquantized
/// schemes can be stored in every dialect that is written.
Status check_dialect(Dialect dialect, const QuantScheme& scheme);

}  // namespace nibble
