#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "core/buffer.h"
#include "quant/quant_tensor.h"

namespace nibble {

// A router and rows of activations that make it choose given experts: row e of the router reads
// column e of a row, which holds a number for the experts that the row is to take and 0 for others.
// All other columns are random. A layer's hidden size must be at least the number of its experts.

/// Weights [experts, hidden] of a router, in BF16. kResourceExhausted.
Result<QuantTensor> steering_router(int64_t experts, int64_t hidden);

/// What the rows of a benchmark are to take.
struct SteeredRows {
  std::span<const int32_t> chosen;  // [rows, top_k], best first
  int64_t top_k = 0;
  int64_t experts = 0;
  int64_t hidden = 0;
};
/// Rows [rows, hidden] in BF16, all different. kResourceExhausted.
Result<Buffer> steered_rows(const SteeredRows& rows, uint64_t seed);

}  // namespace nibble
