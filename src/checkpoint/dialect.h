#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "quant/scheme.h"

namespace nibble {

/// Whose way of storing quantized weights a checkpoint is written in: tensors and config.json.
enum class Dialect : uint8_t {
  kCompressedTensors,  // vllm-project/compressed-tensors
  kQuark,              // AMD Quark, two stages of scales
  kFp8Block,           // DeepSeek: E4M3 with weight_scale_inv
};

/// Accepts compressed-tensors, quark and fp8.
Result<Dialect> parse_dialect(std::string_view name);
[[nodiscard]] std::string_view dialect_name(Dialect dialect);
/// The dialect that a scheme is written in unless another is asked for.
[[nodiscard]] Dialect default_dialect(const QuantScheme& scheme);
/// kUnsupported, naming those that can, when a dialect has no way to store a scheme. Unquantized
/// schemes can be stored in every dialect.
Status check_dialect(Dialect dialect, const QuantScheme& scheme);

}  // namespace nibble
