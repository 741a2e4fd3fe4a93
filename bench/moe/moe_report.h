#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "bench/moe/moe_bench.h"

namespace nibble {

/// What a run of `nibble bench moe` measured.
struct MoeReport {
  std::string backend;
  int threads = 1;
  double read_gbps = 0;  // measured before the layers
  std::vector<MoeTiming> timings;
};

/// {"backend", "threads", "layer", "routing", "seed", "ceilings", "runs"}.
[[nodiscard]] Json moe_report_json(const MoeReport& report, const MoeBenchOptions& options);

/// A timing as a line of a table, and the table's head.
[[nodiscard]] std::string moe_timing_head();
[[nodiscard]] std::string moe_timing_line(const MoeTiming& timing);

}  // namespace nibble
