#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"

namespace nibble {

/// What to do about a file with such numbers.
inline constexpr std::string_view kNotFiniteRemedy =
    "the file is damaged, or training had diverged when it was saved: get another copy";

/// Whether none of the numbers is NaN or infinite. Numbers of other types than F32, F16, BF16,
/// F8_E4M3 and F8_E8M0 pass. Runs at the speed of memory.
[[nodiscard]] bool all_finite(DType dtype, std::span<const std::byte> numbers);
/// "element [3, 17] is nan" for the first number of the tensor that is NaN or infinite; empty when
/// there is none.
[[nodiscard]] std::string describe_not_finite(const TensorInfo& tensor);
/// kCorrupt naming file, tensor and place when a number is NaN or infinite.
Status check_finite(const CheckpointReader& reader, const TensorInfo& tensor);
/// The same of all tensors, in file order. Reads the whole checkpoint.
Status check_all_finite(const CheckpointReader& reader);

}  // namespace nibble
