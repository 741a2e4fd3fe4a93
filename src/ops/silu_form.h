#pragma once

#include <cstdint>

#include "core/gemm_input.h"

namespace nibble {

/// silu(gate) is multiplied by `factor`, and only these of its bits are kept.
struct SiluForm {
  float factor = 1.0F;
  uint32_t bits = 0xffffffffU;
};

/// In front of rounding to INT8, whose step is 2^-7 of a row's largest number, 12 significant bits
/// are kept: a last place of F32 by which CPU and GPU differ would change a row's scale, and so the
/// last places of all that follows. The factor moves the results of all gates in BF16 away from
/// where those bits change: silu would have to be wrong by three units in the last place.
constexpr SiluForm kSiluOfInt8{0x1.00073Cp0F, 0xfffff000U};
/// The same of g / (1 + e^(-kSwigluAlpha g)), where the product with alpha is rounded to F32.
constexpr SiluForm kSwigluOfInt8{0x1.000DFAp0F, 0xfffff000U};

/// In front of rounding to INT8, by the activation.
[[nodiscard]] constexpr SiluForm silu_of_int8(GemmInput::Kind kind) {
  return kind == GemmInput::Kind::kClampedSwiglu ? kSwigluOfInt8 : kSiluOfInt8;
}

}  // namespace nibble
