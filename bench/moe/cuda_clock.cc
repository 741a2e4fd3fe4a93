#include "bench/moe/cuda_clock.h"

#include "base/math.h"

namespace nibble {

namespace {

// Least runs in a graph: its first and last weigh little among them, as in a model's step.
constexpr int64_t kShortRuns = 16;
constexpr int64_t kLongRuns = 4;
constexpr int64_t kShortRows = 256;

}  // namespace

int64_t CudaClock::cold_bytes() const {
  return int64_t{4} * 50 << 20;  // four times the L2 of an H100 or H200
}

Result<RunTimings> CudaClock::time(const LayerRuns& runs) {
  const int64_t count = round_up(runs.rows <= kShortRows ? kShortRuns : kLongRuns, runs.copies);
  const auto issue = [&] {
    for (int64_t i = 0; i < count; ++i) {
      runs.issue(i % runs.copies, runs.rows);
    }
  };
  NIBBLE_ASSIGN_OR_RETURN(const CudaReplays replays, bench_.replay({.backend = &backend_,
                                                                    .issue = issue,
                                                                    .repeats = options_.repeats,
                                                                    .rest = options_.rest,
                                                                    .replays = runs.recordable}));
  RunTimings timings;
  for (const double us : replays.us) {
    timings.us.push_back(us / static_cast<double>(count));
    timings.read_gbps.push_back(options_.read_gbps);
  }
  timings.launches = static_cast<double>(replays.kernels) / static_cast<double>(count);
  return timings;
}

}  // namespace nibble
