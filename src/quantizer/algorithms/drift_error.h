#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "quantizer/algorithms/output_error.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

/// What a drift adds to output_error(), for several ways of rounding the same weights W. With
/// E = W - values the products lose |E X + W (F - X)|^2 against the unrounded model; this is that
/// less trace(E H E^T) and less what no values can change: 2 trace(W D E^T) + |W Z|^2.
class DriftError final {
 public:
  /// The site has a factor and a drift. `weights` without values.
  DriftError(const SiteStatistics& site, const ChangedWeights& weights, ThreadPool& pool);
  /// values [n, k].
  [[nodiscard]] double of(const float* values) const;

 private:
  const float* w_;
  std::vector<float> products_;  // [n, k]: W D
  double constant_ = 0;          // |W Z|^2
};

}  // namespace nibble
