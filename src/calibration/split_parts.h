#pragma once

#include <cstdint>

#include "arch/config.h"

namespace nibble {

/// Into how many equal parts, 8 or a smaller power of two, the channels can be cut that attention's
/// output and down multiply, at ends of blocks, and of heads: so many devices can share a model by
/// these products' columns.
[[nodiscard]] int64_t split_parts(const ModelConfig& config, int64_t block);

}  // namespace nibble
