#pragma once

#include <vector>

namespace nibble {

struct Quartiles {
  double p25 = 0;
  double median = 0;
  double p75 = 0;
};

/// Values with a quarter, half and three quarters of all below them (where that falls between two,
/// the upper one); there must be some.
[[nodiscard]] Quartiles quartiles(std::vector<double> values);
[[nodiscard]] double median(std::vector<double> values);

}  // namespace nibble
