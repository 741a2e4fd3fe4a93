#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "base/thread_pool.h"
#include "quant/scheme.h"
#include "quantizer/algorithms/gram.h"

namespace nibble {

/// Sums over the rows that enter a place: of what they are, and of what rounding them changes.
class PlaceSums final {
 public:
  /// rounded: the formats that rows are rounded to.
  PlaceSums(int64_t k, const std::set<ActFormat>& rounded);

  /// x [count, k].
  void add(const std::vector<float>& x, ThreadPool& pool);
  /// Adds another's sums, times a factor; its rows are not counted.
  void add_sums(const PlaceSums& other, double factor);
  /// After all rows.
  void finish();

  [[nodiscard]] const Gram& rows() const { return rows_; }
  /// Of Q(x) - x; null for a format that rows are not rounded to.
  [[nodiscard]] const Gram* changes(ActFormat act) const;
  /// Bytes that those of k columns take.
  static int64_t bytes(int64_t k, size_t rounded) {
    return 4 * k * k * static_cast<int64_t>(1 + rounded);
  }

 private:
  Gram rows_;
  std::map<ActFormat, Gram> changes_;
};

}  // namespace nibble
