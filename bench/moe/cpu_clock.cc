#include "bench/moe/cpu_clock.h"

#include <chrono>

namespace nibble {

Result<RunTimings> CpuClock::time(const LayerRuns& runs) {
  using Clock = std::chrono::steady_clock;
  RunTimings timings;
  runs.issue(0, runs.rows);  // memory that is touched for the first time is slow
  double before = ceilings_.read_gbps();
  for (int64_t i = 0; i < repeats_; ++i) {
    const int64_t copy = (i + 1) % runs.copies;
    if (runs.copies > 1) {
      runs.issue(i % runs.copies, 1);  // wakes the threads
    }
    const auto begin = Clock::now();
    runs.issue(copy, runs.rows);
    const std::chrono::duration<double, std::micro> us = Clock::now() - begin;
    const double after = ceilings_.read_gbps();
    timings.us.push_back(us.count());
    timings.read_gbps.push_back((before + after) / 2);
    before = after;
  }
  return timings;
}

}  // namespace nibble
