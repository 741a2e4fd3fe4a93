#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "backend/cuda/row_kernels.h"
#include "quant/scheme.h"

namespace nibble::cuda {

// What calibration computes beside matrix products. All pointers are device memory; matrices lie
// row by row. Calls are stream-ordered, allocate nothing, and give the same bytes in every run.

/// Numbers as two BF16 each: high is the nearest, low the nearest to what is left. Of codes times
/// their scale 2^-17 of a number is lost at most.
///   rows  of a form that has scales; high, low [count, k] bf16
struct SplitRowsArgs {
  QuantizedRows rows;
  int64_t count = 0;
  int64_t k = 0;
  void* high = nullptr;
  void* low = nullptr;
};
cudaError_t split_rows(const SplitRowsArgs& args, cudaStream_t stream);

/// h [k, k]: above the diagonal what is below it.
cudaError_t complete_symmetric(float* h, int64_t k, cudaStream_t stream);
/// out [k] := the diagonal of h [k, k].
cudaError_t take_diagonal(const float* h, int64_t k, float* out, cudaStream_t stream);
/// to[i] += factor * from[i].
cudaError_t add_scaled(
    const float* from, double factor, int64_t count, float* to, cudaStream_t stream);

/// to[i, j] := from[order[k-1-i], order[k-1-j]] for j <= i, with the damped diagonal.
struct ReversedSumsArgs {
  const float* from = nullptr;  // [k, k], symmetric
  const int32_t* order = nullptr;
  int64_t k = 0;
  double damping = 0;
  double floor = 0;
  float* to = nullptr;  // [k, k]
};
cudaError_t reverse_sums(const ReversedSumsArgs& args, cudaStream_t stream);

inline constexpr int64_t kFactorBlock = 128;

/// The Cholesky factor of a square block at the diagonal, whose lower triangle is read and
/// replaced, and its inverse, with zeros above the diagonal. failed[i] := 1 when a pivot of the
/// i-th block is not positive.
struct FactorBlockArgs {
  float* a = nullptr;  // [count, count], rows `stride` apart
  int64_t stride = 0;
  int64_t count = 0;         // at most kFactorBlock
  float* inverse = nullptr;  // [batch, kFactorBlock, kFactorBlock], of which rows [0, count)
  int32_t* failed = nullptr;
  int64_t batch = 1;         // blocks
  int64_t batch_stride = 0;  // numbers from one to the next
};
cudaError_t factor_block(const FactorBlockArgs& args, cudaStream_t stream);

/// Turns a row of numbers round, in place: of a lower triangle [k, k] it makes an upper one in the
/// opposite order.
cudaError_t reverse_in_place(float* a, int64_t count, cudaStream_t stream);

/// to[order[p] or p, row] := from [rows, k], padded to `stride` rows: to[p, row] = from[row,
/// order[p]]. Rows past the last hold `rest`.
struct TurnArgs {
  const float* from = nullptr;     // [rows, k]
  const int32_t* order = nullptr;  // [k], or null: as they are
  int64_t rows = 0;
  int64_t k = 0;
  float* to = nullptr;  // [k, stride]
  int64_t stride = 0;   // a multiple of 32
  float rest = 0.0F;
};
cudaError_t turn_columns(const TurnArgs& args, cudaStream_t stream);
/// The inverse: to[row, order[p]] = from[p, row]; args.from is [k, stride], args.to [rows, k].
cudaError_t turn_back_columns(const TurnArgs& args, cudaStream_t stream);

/// How weights become the values of their codes: the device's form of WeightFormat.
struct ValueForm {
  bool fp4 = false;  // else integers
  float low = 0;     // range of these
  float high = 0;
};
[[nodiscard]] ValueForm value_form(const WeightFormat& format);

/// values [rows, k] := the nearest to w [rows, k]; scales, zeros [rows, groups], zeros may be null.
struct NearestArgs {
  ValueForm form;
  const float* w = nullptr;
  const float* scales = nullptr;
  const float* zeros = nullptr;
  int64_t rows = 0;
  int64_t k = 0;
  int64_t groups = 0;
  float* values = nullptr;
};
cudaError_t nearest_values(const NearestArgs& args, cudaStream_t stream);

inline constexpr int64_t kColumnBlock = 128;

/// One block of columns of GPTQ, column by column in their order: a thread for each row.
///   w, sums  [count, stride]: of the block. w becomes the values
///   errors   [count, stride] out: w less its value
struct ColumnBlockArgs {
  ValueForm form;
  float* w = nullptr;
  const float* sums = nullptr;
  float* errors = nullptr;
  const float* factor = nullptr;  // [count, count], upper triangle, rows factor_stride apart
  int64_t factor_stride = 0;
  const int32_t* order = nullptr;  // [count]: columns of the block where they are stored
  int64_t count = 0;               // at most kColumnBlock
  int64_t width = 0;               // of a group
  const float* scales = nullptr;   // [groups, stride]
  const float* zeros = nullptr;    // likewise, or null
  int64_t stride = 0;              // rows, a multiple of 64
};
cudaError_t round_column_block(const ColumnBlockArgs& args, cudaStream_t stream);

/// to[i] := a[i] - b[i].
cudaError_t subtract(const float* a, const float* b, int64_t count, float* to, cudaStream_t stream);

inline constexpr int64_t kDotParts = 512;

/// parts [kDotParts] f64: their sum, in order, is that of a[i] * b[i].
cudaError_t dot_parts(
    const float* a, const float* b, int64_t count, double* parts, cudaStream_t stream);

}  // namespace nibble::cuda
