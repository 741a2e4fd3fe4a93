#pragma once

#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "backend/cuda/memory.h"

namespace nibble::cuda {

/// Adds up how long a stream works between marks.
class DeviceTimer final {
 public:
  void start(cudaStream_t stream);
  void stop(cudaStream_t stream);
  /// Seconds between all starts and stops since the last call; waits for the last stop.
  double take();

 private:
  struct Interval {
    Event begin;
    Event end;
  };
  std::vector<Interval> intervals_;
  size_t used_ = 0;
};

}  // namespace nibble::cuda
