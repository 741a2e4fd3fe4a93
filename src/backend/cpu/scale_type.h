#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/cpu/kernel_table.h"
#include "quant/quant_view.h"

namespace nibble::cpu {

[[nodiscard]] DType dtype_of(ScaleType type);
[[nodiscard]] int64_t bytes_of(ScaleType type);

/// One number in `type`, at any address; stored rounded to nearest, ties to even.
[[nodiscard]] float load_number(ScaleType type, const std::byte* from);
void store_number(ScaleType type, float value, std::byte* out);

/// The type in which scales of `format` are packed where it has all of them (scales_fit()), else
/// F32.
///   factor  of packed scales over the file's, a power of two: it would leave the range of F16
[[nodiscard]] ScaleType wanted_type(const WeightFormat& format, float factor);
/// Whether `type` has every scale and minimum of the weights.
[[nodiscard]] bool scales_fit(const QuantView& weight, ScaleType type);

}  // namespace nibble::cpu
