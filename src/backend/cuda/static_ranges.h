#pragma once

#include <cstdint>

#include "backend/cuda/memory.h"
#include "backend/range_report.h"

namespace nibble::cuda {

/// Counts the numbers that steps put into the int4_static cache from far outside of its ranges, in
/// page-locked memory which kernels write when there is one, and warns of them.
class StaticRanges final {
 public:
  StaticRanges() = default;
  StaticRanges(const StaticRanges&) = delete;
  StaticRanges& operator=(const StaticRanges&) = delete;
  /// Warns of what no report() has seen.
  ~StaticRanges() { report(); }

  /// Where kernels count, at an address that recorded steps keep; memory is allocated when it is
  /// first asked for.
  [[nodiscard]] Result<uint32_t*> counter();
  /// Warns of what steps that have ended counted; those still under way may be among them.
  void report();
  /// What was counted until now is nobody's: it is not warned of.
  void forget();

 private:
  [[nodiscard]] uint32_t counted() const;

  DeviceBuffer memory_;
  uint32_t reported_ = 0;
  RangeReport warnings_;
};

}  // namespace nibble::cuda
