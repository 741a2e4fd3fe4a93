#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "bench/quartiles.h"
#include "bench/serving/offline_bench.h"

namespace nibble {

/// What was measured of a shape.
struct ShapeReport {
  OfflineShape shape;
  double prefill_ms = 0;
  double decode_ms = 0;
  double prefill_tps = 0;
  double decode_tps = 0;
  double throughput_tps = 0;  // tokens of answers over the time of prefills and decode steps
  int64_t kv_bytes = 0;       // of one sequence, in one decode step
  double read_gbps = 0;
  Quartiles roofline;             // percent, of the turns of decode steps
  std::vector<double> rounds_ms;  // prefills
  std::vector<double> peak_tops;  // of their instructions, around each; or none
  ExpertCounts decode_experts;    // no runs: the model has none
  // Rates over those of the first shape; not for itself.
  std::optional<Quartiles> prefill_over_first;
  std::optional<Quartiles> decode_over_first;
};

/// Everything but the ratios to the first shape. Bytes are those that a decode step reads: weights,
/// and keys and values of one sequence.
[[nodiscard]] ShapeReport report_of(const OfflineShape& shape,
                                    const OfflineTimings& timings,
                                    int64_t weight_bytes,
                                    int64_t kv_bytes);

/// Fills in the ratios of all reports but the first.
void compare_with_first(const std::vector<OfflineTimings>& timings,
                        std::vector<ShapeReport>& reports);

}  // namespace nibble
