#include "bench/quartiles.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace nibble {

Quartiles quartiles(std::vector<double> values) {
  CHECK(!values.empty());
  std::ranges::sort(values);
  const size_t count = values.size();
  return {values[count / 4], values[count / 2], values[count * 3 / 4]};
}

double median(std::vector<double> values) { return quartiles(std::move(values)).median; }

}  // namespace nibble
