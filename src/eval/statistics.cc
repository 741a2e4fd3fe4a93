#include "eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/check.h"

namespace nibble {

Estimate estimate_of(std::span<const double> values) {
  if (values.empty()) {
    return {};
  }
  const auto count = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  if (values.size() == 1) {
    return {.mean = mean};
  }
  double squares = 0;
  for (const double value : values) {
    squares += (value - mean) * (value - mean);
  }
  return {.mean = mean, .error = std::sqrt(squares / (count - 1) / count)};
}

Estimate paired_difference(std::span<const double> a, std::span<const double> b) {
  CHECK_EQ(a.size(), b.size());
  std::vector<double> differences(a.size());
  std::ranges::transform(a, b, differences.begin(), std::minus<>());
  return estimate_of(differences);
}

Estimate root_mean_square(std::span<const double> values) {
  std::vector<double> squares(values.size());
  std::ranges::transform(values, squares.begin(), [](double value) { return value * value; });
  const Estimate square = estimate_of(squares);
  const double root = std::sqrt(square.mean);
  return {.mean = root, .error = root > 0 ? square.error / (2 * root) : 0};
}

double quantile(std::span<const double> sorted, double share) {
  CHECK(!sorted.empty());
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

}  // namespace nibble
