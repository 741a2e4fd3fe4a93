#pragma once

#include <string>

#include "checkpoint/linear_reader.h"

namespace nibble {

/// Whether a module's 4-bit codes lie in words of Quark or GPTQ (X.weight in I32, X.qweight).
[[nodiscard]] bool is_repacked(const CheckpointReader& reader,
                               const QuantConfig& config,
                               const std::string& module);

/// Weights of such a module in the form that kernels take: scales are copies, and so are codes that
/// do not lie in rows. A scale of several stages is their product, rounded to f32.
Result<MappedLinear> map_repacked(const CheckpointReader& reader,
                                  const QuantConfig& config,
                                  const std::string& module);

}  // namespace nibble
