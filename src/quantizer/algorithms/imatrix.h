#pragma once

#include <span>
#include <vector>

namespace nibble {

/// How much the squared error of a column counts in the search of scales: its sum of squares over
/// the mean of all, at least 1e-6; all 1 where there are no sums. [k]
///   diagonal  of the sums
[[nodiscard]] std::vector<float> column_importance(std::span<const float> diagonal);

}  // namespace nibble
