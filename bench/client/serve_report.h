#pragma once

#include <string>
#include <vector>

#include "bench/client/paired_ratio.h"
#include "bench/client/serve_bench.h"

namespace nibble {

/// How B compares with A in one number.
struct ComparedNumber {
  std::string name;
  double a = 0;  // medians over the rounds
  double b = 0;
  PairedRatio ratio;
};

/// Writes --report, a web page without outside parts: every run with its numbers, the distribution
/// of its times and its tokens by second; of several loads, numbers over load; of two servers,
/// their ratios. Nothing without the flag.
///   swept: "concurrency", "request rate" of a sweep; else empty
Status write_report(const LoadFlags& flags,
                    const std::string& swept,
                    const std::vector<ServeRun>& runs,
                    const std::vector<ComparedNumber>& compared);

}  // namespace nibble
