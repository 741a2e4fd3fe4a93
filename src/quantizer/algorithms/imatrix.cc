#include "quantizer/algorithms/imatrix.h"

#include <algorithm>
#include <cmath>

#include "quantizer/algorithms/gram.h"

namespace nibble {

std::vector<float> column_importance(std::span<const float> diagonal) {
  constexpr double kLeast = 1e-6;
  const double mean = mean_diagonal(diagonal);
  std::vector<float> importance(diagonal.size(), 1.0F);
  if (!(mean > 0) || !std::isfinite(mean)) {
    return importance;
  }
  for (size_t i = 0; i < diagonal.size(); ++i) {
    importance[i] = static_cast<float>(std::max(diagonal[i] / mean, kLeast));
  }
  return importance;
}

}  // namespace nibble
