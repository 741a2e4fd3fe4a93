#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include <cuda_runtime_api.h>

#include "base/status.h"

namespace nibble::cuda {

/// The work of decode steps as CUDA graphs, one for each size: recorded when a size first occurs.
class StepRecorder final {
 public:
  explicit StepRecorder(cudaStream_t stream) : stream_(stream) {}
  StepRecorder(const StepRecorder&) = delete;
  StepRecorder& operator=(const StepRecorder&) = delete;
  ~StepRecorder();

  /// Rows that a step of `rows` sequences is recorded for, at most `most`.
  [[nodiscard]] static int64_t bucket(int64_t rows, int64_t most);
  /// Runs what `issue` issues on the stream, recording it under (program, rows) at first. Where the
  /// GPU has no memory for the record, `issue` is called again, then and from then on.
  Status run(int64_t program, int64_t rows, const std::function<void()>& issue);

 private:
  /// Null where there is no memory for it.
  Result<cudaGraphExec_t> record(const std::function<void()>& issue);

  cudaStream_t stream_;
  std::map<std::pair<int64_t, int64_t>, cudaGraphExec_t> graphs_;
};

}  // namespace nibble::cuda
