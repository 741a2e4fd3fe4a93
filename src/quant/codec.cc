#include "quant/codec.h"

#include <cstring>

#include "base/check.h"
#include "base/f16.h"
#include "quant/fake_quant.h"

namespace nibble {
namespace {

// Visits runs of weights under one scale: visit(begin, end, scale).
template <typename Visit>
void for_each_group(const WeightFormat& format, int64_t k, const float* scales, Visit visit) {
  if (format.scale_per != ScalePer::kGroup) {
    visit(int64_t{0}, k, format.quantized() ? scales[0] : 1.0F);
    return;
  }
  CHECK_EQ(k % format.group_size, 0);
  for (int64_t g = 0; g < k / format.group_size; ++g) {
    visit(g * format.group_size, (g + 1) * format.group_size, scales[g]);
  }
}

template <typename T>
void store(std::byte* codes, int64_t index, T value) {
  std::memcpy(codes + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

template <typename T>
T load(const std::byte* codes, int64_t index) {
  T value;
  std::memcpy(&value, codes + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// Nibble i of the row is bits 4(i % 2).. of byte i / 2: the little-endian image of the words.
void encode_int4(const float* x, int64_t begin, int64_t end, float scale, std::byte* codes) {
  constexpr CodeRange kRange = code_range(WeightCode::kInt4);
  for (int64_t i = begin; i < end; ++i) {
    const auto nibble = static_cast<unsigned>(encode_int(x[i], scale, kRange) + 8);
    codes[i / 2] |= static_cast<std::byte>(nibble << (i % 2 * 4));
  }
}

void decode_int4(const std::byte* codes, int64_t begin, int64_t end, float scale, float* out) {
  for (int64_t i = begin; i < end; ++i) {
    const int nibble = (std::to_integer<int>(codes[i / 2]) >> (i % 2 * 4)) & 15;
    out[i] = static_cast<float>(nibble - 8) * scale;
  }
}

}  // namespace

void encode_row(
    const WeightFormat& format, const float* x, int64_t k, const float* scales, std::byte* codes) {
  if (format.code == WeightCode::kInt4) {
    std::memset(codes, 0, static_cast<size_t>(QuantTensor::code_row_bytes(format.code, k)));
  }
  for_each_group(format, k, scales, [&](int64_t begin, int64_t end, float scale) {
    switch (format.code) {
      case WeightCode::kInt4:
        encode_int4(x, begin, end, scale, codes);
        break;
      case WeightCode::kInt8:
        for (int64_t i = begin; i < end; ++i) {
          store(codes, i, static_cast<int8_t>(encode_int(x[i], scale, code_range(format.code))));
        }
        break;
      case WeightCode::kFp8E4M3:
        for (int64_t i = begin; i < end; ++i) {
          store(codes, i, encode_e4m3(x[i] / scale));
        }
        break;
      case WeightCode::kBf16:
        for (int64_t i = begin; i < end; ++i) {
          store(codes, i, f32_to_bf16(x[i]));
        }
        break;
      case WeightCode::kF16:
        for (int64_t i = begin; i < end; ++i) {
          store(codes, i, f32_to_f16(x[i]));
        }
        break;
      case WeightCode::kF32:
        std::memcpy(codes, x, static_cast<size_t>(k) * sizeof(float));
        break;
    }
  });
}

void decode_row(const QuantTensor& tensor, int64_t row, float* out) {
  const WeightFormat& format = tensor.format;
  const std::byte* codes = tensor.codes.data() + row * tensor.row_bytes();
  const float* scales = tensor.scales.as<float>().data() + row * format.groups(tensor.k);
  for_each_group(format, tensor.k, scales, [&](int64_t begin, int64_t end, float scale) {
    switch (format.code) {
      case WeightCode::kInt4:
        decode_int4(codes, begin, end, scale, out);
        break;
      case WeightCode::kInt8:
        for (int64_t i = begin; i < end; ++i) {
          out[i] = static_cast<float>(load<int8_t>(codes, i)) * scale;
        }
        break;
      case WeightCode::kFp8E4M3:
        for (int64_t i = begin; i < end; ++i) {
          out[i] = decode_e4m3(load<uint8_t>(codes, i)) * scale;
        }
        break;
      case WeightCode::kBf16:
        for (int64_t i = begin; i < end; ++i) {
          out[i] = bf16_to_f32(load<uint16_t>(codes, i));
        }
        break;
      case WeightCode::kF16:
        for (int64_t i = begin; i < end; ++i) {
          out[i] = f16_to_f32(load<uint16_t>(codes, i));
        }
        break;
      case WeightCode::kF32:
        std::memcpy(out, codes, static_cast<size_t>(tensor.k) * sizeof(float));
        break;
    }
  });
}

void fake_quant_row(
    const WeightFormat& format, const float* x, int64_t k, const float* scales, float* out) {
  for_each_group(format, k, scales, [&](int64_t begin, int64_t end, float scale) {
    for (int64_t i = begin; i < end; ++i) {
      switch (format.code) {
        case WeightCode::kInt4:
        case WeightCode::kInt8:
          out[i] = static_cast<float>(encode_int(x[i], scale, code_range(format.code))) * scale;
          break;
        case WeightCode::kFp8E4M3:
          out[i] = decode_e4m3(encode_e4m3(x[i] / scale)) * scale;
          break;
        case WeightCode::kBf16:
          out[i] = bf16_to_f32(f32_to_bf16(x[i]));
          break;
        case WeightCode::kF16:
          out[i] = f16_to_f32(f32_to_f16(x[i]));
          break;
        case WeightCode::kF32:
          out[i] = x[i];
          break;
      }
    }
  });
}

}  // namespace nibble
