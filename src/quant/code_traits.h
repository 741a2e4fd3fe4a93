#pragma once

#include <array>
#include <cstdint>

#include "quant/scheme.h"

namespace nibble {

/// What is known of one weight code, so that nobody else lists them.
struct CodeTraits {
  enum class Kind : uint8_t { kPlain, kInteger, kSmallFloat };  // kPlain: means itself, no scale

  WeightCode code;
  Kind kind;
  int bits;
  int low = 0;  // of integers: the range
  int high = 0;
  DType dtype;  // in which canonical codes are stored, alone or (4 bits) several in one
};

inline constexpr std::array kCodeTraits = {
    CodeTraits{.code = WeightCode::kF32,
               .kind = CodeTraits::Kind::kPlain,
               .bits = 32,
               .dtype = DType::kF32},
    CodeTraits{.code = WeightCode::kF16,
               .kind = CodeTraits::Kind::kPlain,
               .bits = 16,
               .dtype = DType::kF16},
    CodeTraits{.code = WeightCode::kBf16,
               .kind = CodeTraits::Kind::kPlain,
               .bits = 16,
               .dtype = DType::kBF16},
    CodeTraits{.code = WeightCode::kInt8,
               .kind = CodeTraits::Kind::kInteger,
               .bits = 8,
               .low = -128,
               .high = 127,
               .dtype = DType::kI8},
    CodeTraits{.code = WeightCode::kFp8E4M3,
               .kind = CodeTraits::Kind::kSmallFloat,
               .bits = 8,
               .dtype = DType::kF8E4M3},
    CodeTraits{.code = WeightCode::kInt4,
               .kind = CodeTraits::Kind::kInteger,
               .bits = 4,
               .low = -8,
               .high = 7,
               .dtype = DType::kI32},
    CodeTraits{.code = WeightCode::kFp4E2M1,
               .kind = CodeTraits::Kind::kSmallFloat,
               .bits = 4,
               .dtype = DType::kU8},
};

[[nodiscard]] constexpr const CodeTraits& code_traits(WeightCode code) {
  return kCodeTraits[static_cast<size_t>(code)];
}

[[nodiscard]] constexpr bool is_plain(WeightCode code) {
  return code_traits(code).kind == CodeTraits::Kind::kPlain;
}
[[nodiscard]] constexpr bool is_integer(WeightCode code) {
  return code_traits(code).kind == CodeTraits::Kind::kInteger;
}

constexpr bool traits_in_order() {
  for (size_t i = 0; i < kCodeTraits.size(); ++i) {
    if (static_cast<size_t>(kCodeTraits[i].code) != i) {
      return false;
    }
  }
  return true;
}
static_assert(traits_in_order());

}  // namespace nibble
