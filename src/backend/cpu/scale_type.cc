#include "backend/cpu/scale_type.h"

#include <cstring>

#include "base/f16.h"

namespace nibble::cpu {

DType dtype_of(ScaleType type) {
  switch (type) {
    case ScaleType::kF32:
      break;
    case ScaleType::kBf16:
      return DType::kBF16;
    case ScaleType::kF16:
      return DType::kF16;
  }
  return DType::kF32;
}

int64_t bytes_of(ScaleType type) { return dtype_bits(dtype_of(type)) / 8; }

float load_number(ScaleType type, const std::byte* from) {
  if (type == ScaleType::kF32) {
    float value = 0;
    std::memcpy(&value, from, 4);
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, from, 2);
  return type == ScaleType::kBf16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

void store_number(ScaleType type, float value, std::byte* out) {
  if (type == ScaleType::kF32) {
    std::memcpy(out, &value, 4);
    return;
  }
  const uint16_t bits = type == ScaleType::kBf16 ? f32_to_bf16(value) : f32_to_f16(value);
  std::memcpy(out, &bits, 2);
}

ScaleType wanted_type(const WeightFormat& format, float factor) {
  switch (format.scale_dtype) {
    case DType::kBF16:
    case DType::kF8E8M0:
      return ScaleType::kBf16;
    case DType::kF16:
      return factor == 1.0F ? ScaleType::kF16 : ScaleType::kF32;
    default:
      return ScaleType::kF32;
  }
}

bool scales_fit(const QuantView& weight, ScaleType type) {
  const bool powers = weight.format.scale_dtype == DType::kF8E8M0;  // of two, whatever holds them
  if (type == ScaleType::kF32 || weight.scale_type == dtype_of(type) ||
      (powers && type == ScaleType::kBf16)) {
    return true;
  }
  const auto fits = [type](float value) {
    std::byte bytes[2];
    store_number(type, value, bytes);
    return load_number(type, bytes) == value;
  };
  const bool minimums = weight.format.zero_points == ZeroPoints::kMinimum;
  const int64_t count = weight.n * weight.format.groups(weight.k);
  for (int64_t i = 0; i < count; ++i) {
    if (!fits(weight.scale(i)) || (minimums && !fits(weight.minimum(i)))) {
      return false;
    }
  }
  return true;
}

}  // namespace nibble::cpu
