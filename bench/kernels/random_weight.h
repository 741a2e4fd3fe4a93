#pragma once

#include <cstdint>

#include "base/status.h"
#include "quant/act_spec.h"
#include "quant/quant_tensor.h"

namespace nibble {

/// A matrix [n, k] of random codes in its canonical form: no NaN, padding of rows zero, scales near
/// 0.01. kUnsupported when k is no multiple of the group size, kResourceExhausted.
Result<QuantTensor> random_weight(const WeightFormat& format, int64_t n, int64_t k, uint64_t seed);

/// What rows of a benchmark with a scheme's products are rounded to. Those in blocks, of a group of
/// the weights or of 128, have the fewer bits in this share of their blocks, spread evenly.
[[nodiscard]] ActSpec bench_act(const QuantScheme& scheme, int64_t k, double low_share);

}  // namespace nibble
