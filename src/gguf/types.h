#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace nibble::gguf {

/// Types of tensors that are read, with ggml's numbers. The elements of a row lie in blocks.
// NOLINTBEGIN(readability-identifier-naming): Q4_0 and Q2_K are what everybody calls them
enum class Type : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kI8 = 24,
  kI16 = 25,
  kI32 = 26,
  kI64 = 27,
  kF64 = 28,
  kBF16 = 30,
  kMXFP4 = 39,
};
// NOLINTEND(readability-identifier-naming)

struct TypeTraits {
  Type type = Type::kF32;
  std::string_view name;   // ggml's: "Q4_K"
  int64_t elements = 1;    // of a block
  int64_t bytes = 0;       // of a block
  bool is_number = false;  // one plain number an element, no shared scale

  bool operator==(const TypeTraits&) const = default;
};

[[nodiscard]] const TypeTraits& type_traits(Type type);
/// The type with ggml's number. kUnsupported, with the name where ggml has one, for the types that
/// are not read (IQ*, TQ*, Q8_1, Q8_K and others); kCorrupt for a number that ggml does not know.
[[nodiscard]] Result<Type> type_from_number(uint32_t number);

}  // namespace nibble::gguf
