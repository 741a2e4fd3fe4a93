#pragma once

#include <memory>
#include <optional>
#include <string>

#include "checkpoint/linear_reader.h"
#include "checkpoint/source_matrix.h"
#include "gguf/types.h"

namespace nibble {

/// Whether a tensor lies otherwise than a plain one of safetensors: in blocks of a GGUF type, or
/// with the rows of its heads in pairs.
[[nodiscard]] bool lies_as_in_gguf(const TensorInfo& tensor);

/// The format in which products take the codes of a GGUF type as they are; nullopt where they are
/// decoded.
[[nodiscard]] std::optional<WeightFormat> gguf_weight_format(gguf::Type type);

/// Where row `row` of a matrix, in the order of Hugging Face, lies in the tensor.
[[nodiscard]] int64_t stored_row(const TensorInfo& tensor, int64_t row);

/// A matrix of such a tensor: decoded as gguf-py does, in the order of Hugging Face.
/// kCorrupt naming the tensor where it is no matrix or its rows do not fit the heads.
Result<std::unique_ptr<SourceMatrix>> make_gguf_source(const CheckpointReader& reader,
                                                       const TensorInfo& tensor,
                                                       std::string module);

/// The same for products: codes, scales and minimums of Q4_0, Q4_1, Q8_0 and MXFP4 as they are,
/// taken apart, where `runs` says that products take their format; everything else, and what does
/// not run, as BF16.
Result<MappedLinear> map_gguf(const CheckpointReader& reader,
                              const TensorInfo& tensor,
                              const RunsFormat& runs);

}  // namespace nibble
