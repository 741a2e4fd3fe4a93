#include "quant/codec.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/f16.h"
#include "quant/fake_quant.h"

namespace nibble {
namespace {

// Visits runs of weights under one scale: visit(begin, end, scale, zero point).
template <typename Visit>
void for_each_group(const WeightFormat& format, int64_t k, RowScales row, Visit visit) {
  const bool zeros = format.zero_points == ZeroPoints::kPerScale;
  if (!format.grouped()) {
    visit(int64_t{0}, k, format.quantized() ? row.scales[0] : 1.0F, zeros ? row.zeros[0] : 0);
    return;
  }
  const int64_t size = format.group_size;
  CHECK(format.scale_per == ScalePer::kBlock || k % size == 0);
  for (int64_t g = 0; g * size < k; ++g) {
    visit(g * size, std::min(k, (g + 1) * size), row.scales[g], zeros ? row.zeros[g] : 0);
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
void store_nibble(std::byte* codes, int64_t index, int nibble) {
  codes[index / 2] |= static_cast<std::byte>(nibble << (index % 2 * 4));
}

int load_nibble(const std::byte* codes, int64_t index) {
  return (std::to_integer<int>(codes[index / 2]) >> (index % 2 * 4)) & 15;
}

void encode_one(WeightCode code, float x, float scale, int zero, std::byte* codes, int64_t i) {
  switch (code) {
    case WeightCode::kInt4:
      store_nibble(codes, i, encode_int(x, scale, static_cast<float>(zero), code_range(code)) + 8);
      break;
    case WeightCode::kFp4E2M1:
      store_nibble(codes, i, encode_e2m1(x / scale));
      break;
    case WeightCode::kInt8:
      store(codes, i,
            static_cast<int8_t>(encode_int(x, scale, static_cast<float>(zero), code_range(code))));
      break;
    case WeightCode::kFp8E4M3:
      store(codes, i, encode_e4m3(x / scale));
      break;
    case WeightCode::kBf16:
      store(codes, i, f32_to_bf16(x));
      break;
    case WeightCode::kF16:
      store(codes, i, f32_to_f16(x));
      break;
    case WeightCode::kF32:
      store(codes, i, x);
      break;
  }
}

template <WeightCode kCode>
float decode_as(const std::byte* codes, int64_t i, float scale, int zero) {
  if constexpr (kCode == WeightCode::kInt4) {
    return static_cast<float>(load_nibble(codes, i) - 8 - zero) * scale;
  } else if constexpr (kCode == WeightCode::kFp4E2M1) {
    return decode_e2m1(static_cast<uint8_t>(load_nibble(codes, i))) * scale;
  } else if constexpr (kCode == WeightCode::kInt8) {
    return static_cast<float>(load<int8_t>(codes, i) - zero) * scale;
  } else if constexpr (kCode == WeightCode::kFp8E4M3) {
    return decode_e4m3(load<uint8_t>(codes, i)) * scale;
  } else if constexpr (kCode == WeightCode::kBf16) {
    return bf16_to_f32(load<uint16_t>(codes, i));
  } else if constexpr (kCode == WeightCode::kF16) {
    return f16_to_f32(load<uint16_t>(codes, i));
  } else {
    static_assert(kCode == WeightCode::kF32);
    return load<float>(codes, i);
  }
}

/// Calls visit.operator()<code>().
template <typename Visit>
void with_code(WeightCode code, const Visit& visit) {
  switch (code) {
    case WeightCode::kInt4:
      return visit.template operator()<WeightCode::kInt4>();
    case WeightCode::kFp4E2M1:
      return visit.template operator()<WeightCode::kFp4E2M1>();
    case WeightCode::kInt8:
      return visit.template operator()<WeightCode::kInt8>();
    case WeightCode::kFp8E4M3:
      return visit.template operator()<WeightCode::kFp8E4M3>();
    case WeightCode::kBf16:
      return visit.template operator()<WeightCode::kBf16>();
    case WeightCode::kF16:
      return visit.template operator()<WeightCode::kF16>();
    case WeightCode::kF32:
      return visit.template operator()<WeightCode::kF32>();
  }
}

}  // namespace

void encode_row(
    const WeightFormat& format, const float* x, int64_t k, RowScales scales, std::byte* codes) {
  CHECK(format.zero_points != ZeroPoints::kMinimum);
  std::memset(codes, 0, static_cast<size_t>(QuantTensor::code_row_bytes(format.code, k)));
  for_each_group(format, k, scales, [&](int64_t begin, int64_t end, float scale, int zero) {
    for (int64_t i = begin; i < end; ++i) {
      encode_one(format.code, x[i], scale, zero, codes, i);
    }
  });
}

void decode_row(const QuantTensor& tensor, int64_t row, float* out) {
  const WeightFormat& format = tensor.format;
  const std::byte* codes = tensor.codes.data() + row * tensor.row_bytes();
  const int64_t first = row * format.groups(tensor.k);
  const RowScales scales = {tensor.scales.as<float>().data() + first,
                            tensor.zeros.as<int8_t>().data() + first};
  const bool minimums = format.zero_points == ZeroPoints::kMinimum;
  const float* minimum = tensor.minimums.as<float>().data() + (minimums ? first : 0);
  const int lowest = code_traits(format.code).low;
  with_code(format.code, [&]<WeightCode kCode>() {
    const auto decode = [&](int64_t begin, int64_t end, float scale, int zero) {
      for (int64_t i = begin; i < end; ++i) {
        out[i] = decode_as<kCode>(codes, i, scale, zero);
      }
    };
    const auto decode_above_minimum = [&](int64_t begin, int64_t end, float scale, int /*zero*/) {
      for (int64_t i = begin; i < end; ++i) {
        out[i] = decode_as<kCode>(codes, i, scale, lowest) + *minimum;
      }
      ++minimum;
    };
    if (minimums) {
      for_each_group(format, tensor.k, scales, decode_above_minimum);
    } else {
      for_each_group(format, tensor.k, scales, decode);
    }
  });
}

void fake_quant_row(
    const WeightFormat& format, const float* x, int64_t k, RowScales scales, float* out) {
  with_code(format.code, [&]<WeightCode kCode>() {
    for_each_group(format, k, scales, [&](int64_t begin, int64_t end, float scale, int zero) {
      for (int64_t i = begin; i < end; ++i) {
        std::byte code[4] = {};
        encode_one(kCode, x[i], scale, zero, code, 0);
        out[i] = decode_as<kCode>(code, 0, scale, zero);
      }
    });
  });
}

}  // namespace nibble
