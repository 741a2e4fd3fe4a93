#pragma once

#include <cstdint>
#include <vector>

#include "backend/cuda/attention.h"
#include "backend/cuda/memory.h"
#include "ops/attention.h"

namespace nibble::cuda {

/// The frequencies of the running step's rows, of models whose RoPE is dynamic. They are made in
/// front of the first layer and serve the others.
class ScaledRope final {
 public:
  void begin_step() { made_of_ = nullptr; }

  /// Gives `launch` the frequencies that `args` asks for; returns how it is to be launched, next.
  /// `most_rows`: of any step.
  Result<LaunchContext> prepare(const RopeAppendArgs& args,
                                int64_t most_rows,
                                cudaStream_t stream,
                                RopeAppendLaunch& launch);

 private:
  DeviceBuffer frequencies_;           // [most_rows, head_dim / 2]
  std::vector<DeviceBuffer> retired_;  // recorded steps may use them
  const float* made_of_ = nullptr;     // in this step; null: not yet
};

}  // namespace nibble::cuda
