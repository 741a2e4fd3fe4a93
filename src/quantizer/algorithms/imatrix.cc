#include "quantizer/algorithms/imatrix.h"

#include <algorithm>
#include <cmath>

namespace nibble {

std::vector<float> column_importance(const Gram& gram) {
  constexpr double kLeast = 1e-6;
  const double mean = gram.mean_diagonal();
  std::vector<float> importance(static_cast<size_t>(gram.k()), 1.0F);
  if (!(mean > 0) || !std::isfinite(mean)) {
    return importance;
  }
  for (int64_t i = 0; i < gram.k(); ++i) {
    importance[static_cast<size_t>(i)] =
        static_cast<float>(std::max(gram.diagonal(i) / mean, kLeast));
  }
  return importance;
}

}  // namespace nibble
