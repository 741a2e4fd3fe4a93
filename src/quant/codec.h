#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "quant/code_traits.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"

namespace nibble {

/// The only definition of how numbers become codes. Vector kernels and quantizers must equal these
/// functions bit for bit.

inline constexpr float kE4M3Max = 448.0F;
inline constexpr uint8_t kE4M3Nan = 0x7f;

/// E4M3 "fn": bias 7, no infinity. Rounds to nearest, ties to even; saturates at +-448 (infinity
/// included); NaN becomes 0x7f with the sign kept; -0 stays -0.
constexpr uint8_t encode_e4m3(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return sign | kE4M3Nan;
  }
  if (magnitude >= 0x43e00000U) {  // 448 and above
    return sign | 0x7eU;
  }
  if (magnitude < 0x3c800000U) {  // below 2^-6: subnormal; adding 2^14 aligns the ulp to 2^-9
    const float shifted = std::bit_cast<float>(magnitude) + 16384.0F;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x46800000U));
  }
  const uint32_t rounded = magnitude + 0x7ffffU + ((magnitude >> 20) & 1U);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120U << 3)));
}

/// Exact value of an E4M3 byte; 0x7f and 0xff are NaN.
constexpr float decode_e4m3(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80U) << 24;
  const uint32_t magnitude = code & 0x7fU;
  if (magnitude == kE4M3Nan) {
    return std::bit_cast<float>(sign | 0x7fc00000U);
  }
  if (magnitude < 8) {  // zero or subnormal: value = mantissa * 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9F;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude + (120U << 3)) << 20));
}

inline constexpr float kE2M1Max = 6.0F;

/// E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 are codes 0..7, bit 3 is the sign. Rounds to nearest, ties to
/// the even code; saturates at +-6; -0 stays -0. NaN becomes +-6.
constexpr uint8_t encode_e2m1(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>((bits >> 28) & 8U);
  const uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude >= 0x40c00000U) {  // 6 and above
    return sign | 7U;
  }
  if (magnitude < 0x3f800000U) {  // below 1: subnormal; adding 2^22 aligns the ulp to 0.5
    const float shifted = std::bit_cast<float>(magnitude) + 4194304.0F;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x4a800000U));
  }
  const uint32_t rounded = magnitude + 0x1fffffU + ((magnitude >> 22) & 1U);
  return static_cast<uint8_t>(sign | ((rounded >> 22) - (126U << 1)));
}

/// Exact value of the low four bits of an E2M1 code.
constexpr float decode_e2m1(uint8_t code) {
  constexpr float kValues[8] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  const float value = kValues[code & 7U];
  return (code & 8U) != 0 ? -value : value;
}

/// 2^(code - 127), the scale of a block of E2M1; 255 is NaN.
constexpr float decode_e8m0(uint8_t code) {
  if (code == 0) {
    return 0x1p-127F;
  }
  return std::bit_cast<float>(code == 255 ? 0x7fc00000U : static_cast<uint32_t>(code) << 23);
}

/// The inverse for powers of two from 2^-127 to 2^127.
constexpr uint8_t encode_e8m0(float power) {
  return static_cast<uint8_t>(std::bit_cast<uint32_t>(power) >> 23);
}

/// Nearest integer of |value| < 2^22, ties to even.
constexpr float round_half_even(float value) {
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: the sum has an ulp of one
  return (value + kMagic) - kMagic;
}

struct CodeRange {
  float low;
  float high;
};

/// Smallest and largest integer code of kInt4 and kInt8.
constexpr CodeRange code_range(WeightCode code) {
  return {static_cast<float>(code_traits(code).low), static_cast<float>(code_traits(code).high)};
}

/// Integer code of value / scale: clamped, then rounded half to even. NaN becomes range.low.
constexpr int encode_int(float value, float scale, CodeRange range) {
  const float quotient = value / scale;
  const float above = quotient > range.low ? quotient : range.low;
  return static_cast<int>(round_half_even(above < range.high ? above : range.high));
}

/// Integer code of value / scale + zero: that sum is rounded to f32, clamped and rounded half to
/// even, so that a zero point of 0 gives encode_int(value, scale, range).
constexpr int encode_int(float value, float scale, float zero, CodeRange range) {
  const float shifted = value / scale + zero;
  const float above = shifted > range.low ? shifted : range.low;
  return static_cast<int>(round_half_even(above < range.high ? above : range.high));
}

/// What the codes of a row mean. Both have format.groups(k) elements.
struct RowScales {
  const float* scales = nullptr;  // f32, not zero; unused when the format is not quantized
  const int8_t* zeros = nullptr;  // zero points; unused when the format has none
};

/// Codes of one row: the inverse layout of QuantTensor.
///   x       [k] f32, finite
///   codes   QuantTensor::code_row_bytes(format.code, k) bytes; padding nibbles are written as 0
/// k must be a multiple of the group size of kGroup; no format with minimums, which files bring.
void encode_row(
    const WeightFormat& format, const float* x, int64_t k, RowScales scales, std::byte* codes);

/// Values of one row, as WeightFormat says, every operation rounded to f32: out [tensor.k].
void decode_row(const QuantTensor& tensor, int64_t row, float* out);

}  // namespace nibble
