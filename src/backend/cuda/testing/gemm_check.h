#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "backend/cuda/gemm_kernel.h"
#include "quant/scheme.h"

namespace nibble::cuda::testing {

/// What a check of one family covers. Every m runs with every result type, with and without bias,
/// at rows wider than n, over poisoned memory, against sums in double precision. Brief tests run
/// once with a bias for BF16 and once more to add.
struct GemmCheck {
  std::string_view scheme;             // of the table, or what messages call the format
  std::optional<WeightFormat> format;  // with activations in BF16; none: the scheme's
  int64_t n = 0, k = 0;
  std::vector<int64_t> row_counts;
  double tolerance = 1e-5;  // of ‖y − reference‖ / ‖reference‖ of f32 results; bf16's adds 2^-8
  uint32_t seed = 1;
};

/// Runs the entry on random weights: the format must be accepted, unpack must invert pack bit for
/// bit, results must be right and repeatable and the workspace's counters must be left as zeros.
void check_gemm(const GemmEntry& entry, const GemmCheck& check);

}  // namespace nibble::cuda::testing
