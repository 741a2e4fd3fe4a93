#pragma once

#include <cstdint>

namespace nibble {

/// How rows were spread over experts: sums over runs of layers, each over rows that are computed at
/// once. GPUs count in memory of this form.
struct ExpertCounts {
  int64_t runs = 0;      // of a layer with experts
  int64_t active = 0;    // experts that had rows
  int64_t slots = 0;     // rows of all experts together
  int64_t rows_max = 0;  // of the expert with the most

  [[nodiscard]] constexpr ExpertCounts operator-(const ExpertCounts& before) const {
    return {runs - before.runs, active - before.active, slots - before.slots,
            rows_max - before.rows_max};
  }
  constexpr ExpertCounts& operator+=(const ExpertCounts& more) {
    runs += more.runs;
    active += more.active;
    slots += more.slots;
    rows_max += more.rows_max;
    return *this;
  }
  constexpr bool operator==(const ExpertCounts&) const = default;

  /// Active experts of a run; 0 without runs.
  [[nodiscard]] constexpr double active_mean() const {
    return runs == 0 ? 0.0 : static_cast<double>(active) / static_cast<double>(runs);
  }
  /// The mean of the most rows over the mean rows of an active expert, 1 where all have as many; 0
  /// without runs.
  [[nodiscard]] constexpr double max_over_mean() const {
    return slots == 0 ? 0.0
                      : static_cast<double>(rows_max) * active_mean() / static_cast<double>(slots);
  }
};

}  // namespace nibble
