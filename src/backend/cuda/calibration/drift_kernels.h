#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace nibble::cuda {

// What the drift of a calibration computes beside products. As in kernels.h all pointers are device
// memory, and calls are stream-ordered, allocate nothing, and give the same bytes in every run.

/// Differences of rows, as two BF16 each: high is the nearest, low the nearest to what is left.
struct RowChangesArgs {
  const void* wanted = nullptr;  // [count] bf16
  const void* x_high = nullptr;  // [count] bf16: wanted less x_high less x_low
  const void* x_low = nullptr;   // likewise; null: nothing
  int64_t count = 0;
  void* high = nullptr;  // [count] bf16
  void* low = nullptr;   // [count] bf16
};
cudaError_t split_changes(const RowChangesArgs& args, cudaStream_t stream);

/// to[i, j] := from[order[i], order[j]], both [k, k].
struct OrderedSumsArgs {
  const float* from = nullptr;
  const int32_t* order = nullptr;
  int64_t k = 0;
  float* to = nullptr;
};
cudaError_t order_sums(const OrderedSumsArgs& args, cudaStream_t stream);

/// *found := 1 when one of the numbers is infinite or NaN.
cudaError_t find_no_number(const float* from, int64_t count, int32_t* found, cudaStream_t stream);

/// The inverse of an upper triangle, with zeros below the diagonal.
struct InvertUpperArgs {
  const float* a = nullptr;  // [count, count], rows `stride` apart
  int64_t stride = 0;
  int64_t count = 0;         // at most kFactorBlock
  float* inverse = nullptr;  // [count, kFactorBlock]
};
cudaError_t invert_upper(const InvertUpperArgs& args, cudaStream_t stream);

}  // namespace nibble::cuda
