#pragma once

#include <cstdint>

namespace nibble::cuda {

/// A block of columns of a matrix that is refined (quantizer/algorithms/refine.h), column by
/// column: one thread takes one row. With e = w - value, `gradients` hold (H + damping) e as it was
/// before the block; what its changes of e make of them is left to a product with H, but for the
/// damping, which is added here.
struct RefineBlockArgs {
  float* values = nullptr;       // [count, stride], of the block
  float* gradients = nullptr;    // [count, stride], of the block
  float* changes = nullptr;      // [count, stride] out: of e
  float* scales = nullptr;       // [groups, stride], of the matrix
  const float* zeros = nullptr;  // likewise, or null
  const float* sums = nullptr;   // [count, count] of H, rows sums_stride apart
  int64_t sums_stride = 0;
  int64_t stride = 0;  // rows, a multiple of 64
  int first = 0;       // the matrix's column that the block begins with, a multiple of 32
  int count = 0;       // at most 128, a multiple of 4
  int width = 0;       // of a group: a multiple of 32, or that of the matrix
  float damping = 0;
};

/// How a fitted scale is stored: in BF16, or as it is.
enum class StoredScale : uint8_t { kF32, kBf16 };

}  // namespace nibble::cuda
