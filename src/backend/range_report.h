#pragma once

#include <cstdint>

namespace nibble {

/// Steps from a channel's mean beyond which a number of the int4_static cache is far outside of its
/// range, which is about 8 steps to each side.
inline constexpr float kFarSteps = 16.0F;

/// Warns of numbers far outside of static ranges: of the first ones, and then whenever there are
/// ten times as many.
class RangeReport final {
 public:
  /// `count` more.
  void add(int64_t count);

 private:
  int64_t count_ = 0;
  int64_t next_ = 1;
};

}  // namespace nibble
