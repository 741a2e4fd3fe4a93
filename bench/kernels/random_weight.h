#pragma once

#include <cstdint>

#include "base/status.h"
#include "quant/quant_tensor.h"

namespace nibble {

/// A matrix [n, k] of random codes in its canonical form: no NaN, padding of rows zero, scales near
/// 0.01. kUnsupported when k is no multiple of the group size, kResourceExhausted.
Result<QuantTensor> random_weight(const WeightFormat& format, int64_t n, int64_t k, uint64_t seed);

}  // namespace nibble
