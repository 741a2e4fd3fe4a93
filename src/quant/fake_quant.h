#pragma once

#include <cstdint>

#include "quant/codec.h"
#include "quant/scheme.h"

namespace nibble {

/// What a row becomes by being stored: out[i] equals decode(encode(x[i])) bit for bit.
///   x, out  [k] f32, may be the same memory
/// k must be a multiple of the group size of kGroup.
void fake_quant_row(
    const WeightFormat& format, const float* x, int64_t k, RowScales scales, float* out);

}  // namespace nibble
