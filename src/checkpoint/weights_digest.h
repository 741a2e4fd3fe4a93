#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"

namespace nibble {

/// Tells weights apart without reading them all: XXH64, 16 hexadecimal digits, of the name, the
/// first and the last kilobyte (all bytes of up to two) of "weight_packed" and "weight_scale" of
/// each of these modules. kNotFound naming a tensor that is not there.
Result<std::string> weights_digest(const CheckpointReader& weights,
                                   std::span<const std::string> modules);

/// The same of modules in any form: of "weight", "weight_packed" or "qweight" of each, whichever is
/// stored. Empty where none is.
[[nodiscard]] std::string modules_digest(const CheckpointReader& weights,
                                         std::span<const std::string> modules);

/// XXH64 with seed 0 of all bytes, 16 hexadecimal digits.
[[nodiscard]] std::string bytes_digest(std::span<const std::byte> bytes);

}  // namespace nibble
