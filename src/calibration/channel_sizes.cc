#include "calibration/channel_sizes.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/check.h"

namespace nibble {

void ChannelSizes::add(const float* rows, int64_t count, int64_t k) {
  sizes_.resize(static_cast<size_t>(k), 0.0);
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t i = 0; i < k; ++i) {
      const auto x = static_cast<double>(rows[row * k + i]);
      double& size = sizes_[static_cast<size_t>(i)];
      size = key_ == OrderKey::kMeanSquare ? size + x * x : std::max(size, std::fabs(x));
    }
  }
}

std::vector<int32_t> order_by_size(const std::vector<double>& sizes, int64_t parts) {
  CHECK_EQ(std::ssize(sizes) % parts, 0);
  std::vector<int32_t> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto larger = [&](int32_t a, int32_t b) {
    return sizes[static_cast<size_t>(a)] > sizes[static_cast<size_t>(b)];
  };
  const int64_t part = std::ssize(sizes) / parts;
  for (int64_t i = 0; i < parts; ++i) {
    const auto begin = order.begin() + i * part;
    std::stable_sort(begin, begin + part, larger);
  }
  return order;
}

}  // namespace nibble
