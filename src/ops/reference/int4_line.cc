#include "ops/reference/int4_line.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace nibble::reference {

double code_of(double value, double scale, double offset) {
  return scale > 0.0 ? std::clamp(std::nearbyint((value - offset) / scale), 0.0, 15.0) : 0.0;
}

namespace {

/// Squared error of the row on the least-squares line through its codes; the line replaces scale
/// and offset.
double refit(const float* values, int64_t dim, double& scale, double& offset) {
  double code_mean = 0.0;
  double mean = 0.0;
  for (int64_t d = 0; d < dim; ++d) {
    code_mean += code_of(values[d], scale, offset) / static_cast<double>(dim);
    mean += values[d] / static_cast<double>(dim);
  }
  double variance = 0.0;
  double covariance = 0.0;
  for (int64_t d = 0; d < dim; ++d) {
    const double code = code_of(values[d], scale, offset) - code_mean;
    variance += code * code;
    covariance += code * (values[d] - mean);
  }
  const double fitted = variance > 0.0 ? covariance / variance : 0.0;
  double error = 0.0;
  for (int64_t d = 0; d < dim; ++d) {
    const double code = code_of(values[d], scale, offset) - code_mean;
    error += std::pow(values[d] - mean - fitted * code, 2);
  }
  scale = fitted;
  offset = mean - fitted * code_mean;
  return error;
}

}  // namespace

FittedLine fit_int4(const float* values, int64_t dim) {
  const auto [low, high] = std::minmax_element(values, values + dim);
  const double middle = 0.5 * (static_cast<double>(*low) + *high);
  double best_scale = 0.0;
  double best_offset = middle;
  double least = std::numeric_limits<double>::infinity();
  for (const double part : {1.0, 0.92, 0.84}) {
    double scale = (static_cast<double>(*high) - *low) * part / 15.0;
    double offset = middle - 7.5 * scale;
    double error = 0.0;
    for (int fit = 0; fit < 3; ++fit) {
      error = refit(values, dim, scale, offset);
    }
    if (error < least) {
      least = error;
      best_scale = scale;
      best_offset = offset;
    }
  }
  FittedLine line{best_scale, best_offset, best_scale, best_offset};
  refit(values, dim, line.end_scale, line.end_offset);
  return line;
}

int int4_code(const std::byte* row, int64_t d) {
  return (static_cast<int>(row[d / 2]) >> (d % 2 * 4)) & 15;
}

void store_code(std::byte* row, int64_t d, double code) {
  const std::byte keep = d % 2 == 0 ? std::byte{0xf0} : std::byte{0x0f};
  row[d / 2] =
      (row[d / 2] & keep) | static_cast<std::byte>(static_cast<unsigned>(code) << (d % 2 * 4));
}

}  // namespace nibble::reference
