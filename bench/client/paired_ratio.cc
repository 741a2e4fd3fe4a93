#include "bench/client/paired_ratio.h"

#include <cmath>
#include <vector>

#include "base/check.h"
#include "eval/statistics.h"

namespace nibble {

double student_95(int64_t freedom) {
  CHECK(freedom > 0);
  // The 97.5 % quantile for 1 to 30 degrees of freedom, from any table of Student's distribution.
  static constexpr double kTable[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306,
                                      2.262,  2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
                                      2.110,  2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064,
                                      2.060,  2.056, 2.052, 2.048, 2.045, 2.042};
  if (freedom <= std::ssize(kTable)) {
    return kTable[freedom - 1];
  }
  // The first terms of its expansion around the normal distribution's quantile.
  constexpr double kNormal = 1.959964;
  constexpr double kCube = kNormal * kNormal * kNormal;
  const auto n = static_cast<double>(freedom);
  return kNormal + (kCube + kNormal) / (4 * n) +
         (5 * kCube * kNormal * kNormal + 16 * kCube + 3 * kNormal) / (96 * n * n);
}

PairedRatio paired_ratio(std::span<const double> a, std::span<const double> b) {
  CHECK_EQ(a.size(), b.size());
  std::vector<double> logs;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] > 0 && b[i] > 0) {
      logs.push_back(std::log(b[i] / a[i]));
    }
  }
  if (logs.empty()) {
    return {};
  }
  const Estimate mean = estimate_of(logs);
  PairedRatio out{.ratio = std::exp(mean.mean), .interval = {}};
  if (logs.size() > 1) {
    const double margin = student_95(std::ssize(logs) - 1) * mean.error;
    out.interval = {.low = std::exp(mean.mean - margin), .high = std::exp(mean.mean + margin)};
  }
  return out;
}

}  // namespace nibble
