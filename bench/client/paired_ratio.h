#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace nibble {

struct Interval {
  double low = 0;
  double high = 0;
};

/// How B compares with A where both did the same, several times.
struct PairedRatio {
  double ratio = 1;                  // geometric mean of b[i] / a[i]
  std::optional<Interval> interval;  // 95 %, by Student's t over the logarithms; of 2 or more pairs
};

/// a, b: of equal length, above 0; pairs with a value that is not are left out.
[[nodiscard]] PairedRatio paired_ratio(std::span<const double> a, std::span<const double> b);

/// The number of standard errors on each side of a mean that hold 95 % of Student's distribution.
///   freedom: degrees of freedom, above 0
[[nodiscard]] double student_95(int64_t freedom);

}  // namespace nibble
