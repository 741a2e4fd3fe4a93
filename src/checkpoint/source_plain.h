#pragma once

#include <memory>
#include <string>

#include "checkpoint/source_matrix.h"

namespace nibble {

/// A matrix [n, k] of numbers within a tensor: element [i, j] is number
/// offset + i * row_stride + j * column_stride. One of the strides is 1 or, for rows that are
/// interleaved with others, row_stride is small and column_stride large.
struct PlainLayout {
  const TensorInfo* tensor = nullptr;  // F32, F16 or BF16
  int64_t n = 0;
  int64_t k = 0;
  int64_t offset = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
};

/// Whether a tensor is of F32, F16 or BF16.
[[nodiscard]] bool is_plain(DType dtype);
/// Whether a tensor is a matrix [n, k] of F32, F16 or BF16 with at least one element.
[[nodiscard]] bool is_plain_matrix(const TensorInfo& tensor);

/// A whole plain matrix; `module` is its name without ".weight".
std::unique_ptr<SourceMatrix> make_plain_source(const CheckpointReader& reader,
                                                const TensorInfo& tensor,
                                                std::string module);
/// Part of a plain tensor. All its elements must lie in the tensor.
std::unique_ptr<SourceMatrix> make_plain_source(const CheckpointReader& reader,
                                                const PlainLayout& layout,
                                                std::string module);

}  // namespace nibble
