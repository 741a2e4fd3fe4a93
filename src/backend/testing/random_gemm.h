#pragma once

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "base/f16.h"
#include "quant/quant_tensor.h"
#include "quant/testing/random_levels.h"

namespace nibble {

/// Shape of a matrix of weights.
struct Problem {
  int64_t n;
  int64_t k;
};

inline std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

/// Every code of the format occurs; bytes past k in a row of nibbles are zero.
inline Result<QuantTensor> random_weight(const WeightFormat& format, Problem shape, uint32_t seed) {
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor weight, QuantTensor::allocate(format, shape.n, shape.k));
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::memset(weight.codes.data(), 0, weight.codes.size());
  for (int64_t n = 0; n < shape.n; ++n) {
    auto* row = reinterpret_cast<uint8_t*>(weight.codes.data()) + n * weight.row_bytes();
    for (int64_t k = 0; k < shape.k; ++k) {
      const float value = normal(random);
      const auto half = format.code == WeightCode::kF16 ? f32_to_f16(value) : f32_to_bf16(value);
      switch (format.code) {
        case WeightCode::kF32:
          std::memcpy(row + 4 * k, &value, 4);
          break;
        case WeightCode::kF16:
        case WeightCode::kBf16:
          std::memcpy(row + 2 * k, &half, 2);
          break;
        case WeightCode::kInt8:
          row[k] = static_cast<uint8_t>(random());
          break;
        case WeightCode::kFp8E4M3:
          row[k] = static_cast<uint8_t>(random());
          row[k] = (row[k] & 0x7f) == 0x7f ? 0x80 : row[k];
          break;
        case WeightCode::kInt4:
        case WeightCode::kFp4E2M1:
          row[k / 2] |= static_cast<uint8_t>((random() & 15U) << (k % 2 * 4));
          break;
      }
    }
  }
  for (float& scale : weight.scales.as<float>()) {
    scale = bf16_to_f32(f32_to_bf16(0.01F * (1.0F + std::fabs(normal(random)))));
    if (format.scale_dtype == DType::kF8E8M0) {
      scale = std::exp2(std::floor(std::log2(scale)));
    } else if (format.scale_dtype == DType::kF16) {  // three bits that BF16 lacks
      scale = f16_to_f32(f32_to_f16(scale * 1.015F));
    }
  }
  const int range = format.code == WeightCode::kInt4 ? 16 : 256;
  for (int8_t& zero : weight.zeros.as<int8_t>()) {
    zero = static_cast<int8_t>(static_cast<int>(random()) % range - range / 2);
  }
  for (float& minimum : weight.minimums.as<float>()) {
    minimum = f16_to_f32(f32_to_f16(0.1F * normal(random) - 0.08F));
  }
  make_levels(weight, random);
  return weight;
}

}  // namespace nibble
