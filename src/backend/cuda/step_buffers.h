#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/backend.h"
#include "backend/cuda/attention.h"
#include "backend/cuda/memory.h"

namespace nibble::cuda {

/// A step's input on the GPU, at addresses that never change: what recorded kernels read.
class StepBuffers final {
 public:
  static constexpr int64_t kSmallestPage = 16;  // tokens

  static Result<StepBuffers> create(const StepLimits& limits);

  /// Copies `input` to the GPU, padded to `shape`: rows past the input's have token 0 and no
  /// sequence; with more rows than sequences were given, as many empty sequences as there are rows
  /// of a decode step. Waits only for the copy of the step before.
  Status write(const StepInput& input, const StepShape& shape, cudaStream_t stream);

  /// Of the step written last; `longest` is one of few values, for records.
  [[nodiscard]] const StepMetadata& metadata() const { return metadata_; }
  [[nodiscard]] const int32_t* tokens() const { return device_int(tokens_at_); }
  [[nodiscard]] const int32_t* logit_rows() const { return device_int(logit_rows_at_); }

 private:
  [[nodiscard]] const int32_t* device_int(int64_t at) const { return device_.as<int32_t>() + at; }
  void fill(const StepInput& input, const StepShape& shape);

  StepLimits limits_;
  int64_t pages_per_sequence_ = 0;
  // Places in both copies, in int32.
  int64_t tokens_at_ = 0, logit_rows_at_ = 0, positions_at_ = 0, row_sequences_at_ = 0;
  int64_t q_begin_at_ = 0, kv_len_at_ = 0, pages_at_ = 0;
  DeviceBuffer device_;
  DeviceBuffer pinned_;
  Event copied_;
  StepMetadata metadata_;
};

}  // namespace nibble::cuda
