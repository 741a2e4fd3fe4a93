#pragma once

#include <cstdint>
#include <span>

namespace nibble {

/// A mean and its standard error: the standard deviation of the sample (n - 1 in its denominator)
/// over the root of n, as lm-eval gives it. Of fewer than two values the error is 0.
struct Estimate {
  double mean = 0;
  double error = 0;
};

[[nodiscard]] Estimate estimate_of(std::span<const double> values);
/// Of the differences a[i] - b[i]: what two models that answered the same questions differ by.
[[nodiscard]] Estimate paired_difference(std::span<const double> a, std::span<const double> b);
/// The root of the mean square; its error follows from that of the mean square.
[[nodiscard]] Estimate root_mean_square(std::span<const double> values);

/// The value below which `share` of [0, 1] lies, between two neighbours on the line through them
/// (as numpy.quantile does).
///   sorted: ascending, not empty
[[nodiscard]] double quantile(std::span<const double> sorted, double share);

}  // namespace nibble
