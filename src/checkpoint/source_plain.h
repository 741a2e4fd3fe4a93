#pragma once

#include <memory>

#include "checkpoint/source_matrix.h"

namespace nibble {

/// Whether a tensor is a matrix [n, k] of F32, F16 or BF16 with at least one element.
[[nodiscard]] bool is_plain_matrix(const TensorInfo& tensor);

/// A plain matrix; `module` is its name without ".weight".
std::unique_ptr<SourceMatrix> make_plain_source(const CheckpointReader& reader,
                                                const TensorInfo& tensor,
                                                std::string module);

/// `count` numbers of F32, F16 or BF16, aligned to nothing, as f32. Infinities and NaN pass.
void decode_plain(DType dtype, const std::byte* in, int64_t count, float* out);

}  // namespace nibble
