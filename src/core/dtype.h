#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace nibble {

/// Element types of tensors in files and memory; names and sizes are those of safetensors.
enum class DType : uint8_t {
  kBool,
  kF4E2M1,
  kF6E2M3,
  kF6E3M2,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kF8E4M3FNUZ,
  kF8E5M2FNUZ,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};  // in ascending rank: the reference writer sorts tensors by descending rank, then by name

/// Bits of one element (4 and 6 for the sub-byte types).
[[nodiscard]] int dtype_bits(DType dtype);
/// safetensors spelling ("BF16"); the inverse is empty for an unknown name.
[[nodiscard]] std::string_view dtype_name(DType dtype);
[[nodiscard]] std::optional<DType> dtype_from_name(std::string_view name);

}  // namespace nibble
