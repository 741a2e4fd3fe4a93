#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "quant/scheme.h"

namespace nibble {

/// Rows that enter a product.
struct ActivationRows {
  float* x = nullptr;  // [rows, k]
  int64_t rows = 0;
  int64_t k = 0;
};

/// Whether a product of this form rounds its rows to few bits.
[[nodiscard]] constexpr bool rounds_rows(ActFormat act) {
  return act != ActFormat::kFloat && act != ActFormat::kBf16;
}

/// A row [k] f32, finite, as a product of this form multiplies it: codes times their scale.
void round_row(ActFormat act, float* row, int64_t k);
/// The same of several rows.
void round_activations(ActFormat act, const ActivationRows& rows, ThreadPool& pool);

}  // namespace nibble
