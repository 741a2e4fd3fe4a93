#pragma once

#include <cstdint>

#include "quant/scheme.h"

namespace nibble {

/// What a row becomes by being stored: out[i] equals decode(encode(x[i])) bit for bit.
///   x, out  [k] f32, may be the same memory
///   scales  [format.groups(k)] f32, not zero; ignored when the format is not quantized
/// k must be a multiple of the group size.
void fake_quant_row(
    const WeightFormat& format, const float* x, int64_t k, const float* scales, float* out);

}  // namespace nibble
