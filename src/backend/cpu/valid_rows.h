#pragma once

#include <cstdint>

#include "base/status.h"
#include "quant/quant_view.h"

namespace nibble::cpu {

/// Whether a row of weights has what products with activations in `act` compute: FP8 codes that are
/// numbers; scales in two levels (quant/levels.h) where groups need them.
[[nodiscard]] bool is_valid_row(const QuantView& weight, int64_t row, ActFormat act);
/// Why a row of `weight` is not valid: kCorrupt for NaN codes, the errors of check_levels().
[[nodiscard]] Status invalid_row(const QuantView& weight, ActFormat act);

}  // namespace nibble::cpu
