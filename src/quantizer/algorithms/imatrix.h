#pragma once

#include <vector>

#include "quantizer/algorithms/gram.h"

namespace nibble {

/// How much the squared error of a column counts in the search of scales: its sum of squares over
/// the mean of all, at least 1e-6; all 1 where there are no sums. [k]
[[nodiscard]] std::vector<float> column_importance(const Gram& gram);

}  // namespace nibble
