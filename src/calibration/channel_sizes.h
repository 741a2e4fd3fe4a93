#pragma once

#include <cstdint>
#include <vector>

namespace nibble {

/// By what channels are ordered, the largest first.
enum class OrderKey : uint8_t { kMeanSquare, kLargest };

/// The size of each channel of some rows: the sum of squares, or the largest magnitude.
class ChannelSizes final {
 public:
  explicit ChannelSizes(OrderKey key) : key_(key) {}

  /// rows [count, k] f32.
  void add(const float* rows, int64_t count, int64_t k);
  [[nodiscard]] const std::vector<double>& all() const { return sizes_; }  // empty: no rows

 private:
  OrderKey key_;
  std::vector<double> sizes_;
};

/// Numbers 0 .. sizes, in equal parts, of each part the largest first; of equal ones the earlier.
[[nodiscard]] std::vector<int32_t> order_by_size(const std::vector<double>& sizes, int64_t parts);

}  // namespace nibble
