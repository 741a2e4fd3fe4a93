#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/kv_sidecar.h"

namespace nibble {

/// The least and the largest of each channel of keys, or of values, as they are and turned; and the
/// ranges for int4_static that may be chosen.
class KvRanges final {
 public:
  KvRanges(int64_t heads, int64_t head_dim);

  /// A head of one token, finite.
  void add(int64_t head, std::span<const float> x);

  /// About the middle of a channel's range, or about 0 and without a mean.
  enum class About : uint8_t { kMiddle, kZero };

  /// Plain and turned ones, each the whole range and parts of it.
  [[nodiscard]] std::vector<KvSidecar::Ranges> candidates(About about) const;

 private:
  struct Extremes {
    std::vector<float> low;
    std::vector<float> high;
  };
  [[nodiscard]] KvSidecar::Ranges ranges_of(bool turned, float part, About about) const;

  int64_t head_dim_;
  Extremes extremes_[2];  // plain, turned
  std::vector<float> turned_;
};

}  // namespace nibble
