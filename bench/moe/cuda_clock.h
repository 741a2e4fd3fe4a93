#pragma once

#include "backend/backend.h"
#include "bench/kernels/cuda_bench.h"
#include "bench/moe/run_clock.h"

namespace nibble {

/// Times runs that are recorded one after the other in a CUDA graph, as layers of a decode step
/// are, each time that the graph is replayed. Runs that are not recordable are issued anew each
/// time instead, and take as long as the host does where that is longer.
class CudaClock final : public RunClock {
 public:
  struct Options {
    int64_t repeats = 9;   // replays that are timed
    double rest = 3.0;     // idle time after each, in its own lengths
    double read_gbps = 0;  // bandwidth of the GPU
  };

  /// Both must outlive the clock.
  CudaClock(const CudaBench& bench, Backend& backend, const Options& options)
      : bench_(bench), backend_(backend), options_(options) {}

  [[nodiscard]] int64_t cold_bytes() const override;
  Result<RunTimings> time(const LayerRuns& runs) override;

 private:
  const CudaBench& bench_;
  Backend& backend_;
  Options options_;
};

}  // namespace nibble
