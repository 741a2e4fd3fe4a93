#pragma once

#include <cstdint>

#include "quant/scheme.h"

namespace nibble {

/// Whether a product of this form rounds its rows to few bits.
[[nodiscard]] constexpr bool rounds_rows(ActFormat act) {
  return act != ActFormat::kFloat && act != ActFormat::kBf16;
}

/// A row [k] f32, finite, as a product of this form multiplies it: codes times their scale.
void round_row(ActFormat act, float* row, int64_t k);

}  // namespace nibble
