#include "gguf/decode.h"

#include <array>
#include <bit>
#include <cstring>

#include "base/f16.h"

namespace nibble::gguf {
namespace {

constexpr int64_t kSuper = 256;  // elements of a block of the K types
constexpr size_t kHalf = 16;     // bytes of 32 packed codes: element j and j + 16 share byte j

// Loaded as a whole, so that the compiler knows that no store to the output changes them.
using Codes = std::array<uint8_t, kHalf>;

template <typename T>
T load(const uint8_t* in) {
  T value;
  std::memcpy(&value, in, sizeof(T));
  return value;
}

float load_f16(const uint8_t* in) { return f16_to_f32(load<uint16_t>(in)); }

// f16_to_f32() without branches, for loops over elements. Signed numbers: SSE2 compares no others.
float f16_value(int32_t half) {
  const int32_t sign = (half & 0x8000) << 16;
  const int32_t magnitude = half & 0x7fff;
  const int32_t infinite = magnitude > 0x7bff ? 112 << 23 : 0;
  const int32_t normal = (magnitude << 13) + (112 << 23) + infinite;
  // 0.5 has an ulp of 2^-24, that of a subnormal.
  const auto subnormal =
      std::bit_cast<int32_t>(std::bit_cast<float>(0x3f000000 | magnitude) - 0.5F);
  const int32_t small = magnitude < 0x400 ? -1 : 0;
  return std::bit_cast<float>(sign | (subnormal & small) | (normal & ~small));
}

// The bits of one byte, each as 16 in a byte of its own, lowest first.
uint64_t fifth_bits(uint8_t bits) {
  // Byte i keeps bit i of the copies; adding what it lacks to 128 moves it to the top.
  const uint64_t kept = (bits * 0x0101010101010101U) & 0x8040201008040201U;
  return ((kept + 0x00406070787c7e7fU) & 0x8080808080808080U) >> 3;
}

// The fifth bits of 32 codes, as 16 or 0.
std::array<uint8_t, 32> all_fifth_bits(const uint8_t* in) {
  std::array<uint8_t, 32> bits;
  for (size_t i = 0; i < 4; ++i) {
    const uint64_t eight = fifth_bits(in[i]);
    std::memcpy(bits.data() + 8 * i, &eight, 8);
  }
  return bits;
}

void decode_q4_0(const uint8_t* in, float* out) {
  const float scale = load_f16(in);
  const auto codes = load<Codes>(in + 2);
  for (size_t j = 0; j < kHalf; ++j) {
    out[j] = scale * static_cast<float>((codes[j] & 15) - 8);
    out[j + kHalf] = scale * static_cast<float>((codes[j] >> 4) - 8);
  }
}

void decode_q4_1(const uint8_t* in, float* out) {
  const float scale = load_f16(in);
  const float minimum = load_f16(in + 2);
  const auto codes = load<Codes>(in + 4);
  for (size_t j = 0; j < kHalf; ++j) {
    out[j] = scale * static_cast<float>(codes[j] & 15) + minimum;
    out[j + kHalf] = scale * static_cast<float>(codes[j] >> 4) + minimum;
  }
}

void decode_q5_0(const uint8_t* in, float* out) {
  const float scale = load_f16(in);
  const auto high = all_fifth_bits(in + 2);
  for (size_t j = 0; j < kHalf; ++j) {
    out[j] = scale * static_cast<float>(((in[6 + j] & 15) | high[j]) - 16);
    out[j + kHalf] = scale * static_cast<float>(((in[6 + j] >> 4) | high[j + kHalf]) - 16);
  }
}

void decode_q5_1(const uint8_t* in, float* out) {
  const float scale = load_f16(in);
  const float minimum = load_f16(in + 2);
  const auto high = all_fifth_bits(in + 4);
  for (size_t j = 0; j < kHalf; ++j) {
    out[j] = scale * static_cast<float>((in[8 + j] & 15) | high[j]) + minimum;
    out[j + kHalf] = scale * static_cast<float>((in[8 + j] >> 4) | high[j + kHalf]) + minimum;
  }
}

void decode_q8_0(const uint8_t* in, float* out) {
  const float scale = load_f16(in);
  for (int64_t j = 0; j < 32; ++j) {
    out[j] = static_cast<float>(static_cast<int8_t>(in[2 + j])) * scale;
  }
}

// The 2-bit codes of Q2_K and Q3_K: each half of the block has 32 bytes with its four quarters.
void decode_q2_k(const uint8_t* in, float* out) {
  const uint8_t* scales = in;
  const uint8_t* codes = in + 16;
  const float scale = load_f16(in + 80);
  const float minimum = load_f16(in + 82);
  for (int64_t group = 0; group < 16; ++group) {
    const float step = scale * static_cast<float>(scales[group] & 15);
    const float offset = minimum * static_cast<float>(scales[group] >> 4);
    const auto from = load<Codes>(codes + group / 8 * 32 + group % 2 * 16);
    const int shift = static_cast<int>(group % 8 / 2 * 2);
    for (size_t j = 0; j < 16; ++j) {
      out[group * 16 + static_cast<int64_t>(j)] =
          step * static_cast<float>((from[j] >> shift) & 3) - offset;
    }
  }
}

void decode_q3_k(const uint8_t* in, float* out) {
  const uint8_t* codes = in + 32;
  const uint8_t* scales = in + 96;
  const float scale = load_f16(in + 108);
  for (int64_t group = 0; group < 16; ++group) {
    // Low four bits in the nibbles of 8 bytes, high two bits in quarters of the 4 bytes behind.
    const int low = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4;
    const int high = (scales[8 + group % 4] >> (group / 4 * 2)) & 3;
    const float step = scale * static_cast<float>((low | (high << 4)) - 32);
    const uint8_t* from = codes + group / 8 * 32 + group % 2 * 16;
    const uint8_t* mask = in + group % 2 * 16;
    const int shift = static_cast<int>(group % 8 / 2 * 2);
    const int bit = static_cast<int>(group / 2);
    for (int64_t j = 0; j < 16; ++j) {  // without the mask's bit the code is 4 less
      const int code = ((from[j] >> shift) & 3) + ((mask[j] >> bit) & 1) * 4 - 4;
      out[group * 16 + j] = step * static_cast<float>(code);
    }
  }
}

// Scale and minimum of the eight groups of Q4_K and Q5_K, 6 bits each in 12 bytes.
struct GroupScales {
  std::array<float, 8> step;
  std::array<float, 8> offset;
};

GroupScales group_scales(const uint8_t* in) {
  const float scale = load_f16(in);
  const float minimum = load_f16(in + 2);
  const uint8_t* packed = in + 4;
  GroupScales groups;
  for (size_t i = 0; i < 4; ++i) {
    groups.step[i] = scale * static_cast<float>(packed[i] & 63);
    groups.offset[i] = minimum * static_cast<float>(packed[4 + i] & 63);
    const int step = (packed[8 + i] & 15) | ((packed[i] >> 2) & 48);
    const int offset = (packed[8 + i] >> 4) | ((packed[4 + i] >> 2) & 48);
    groups.step[4 + i] = scale * static_cast<float>(step);
    groups.offset[4 + i] = minimum * static_cast<float>(offset);
  }
  return groups;
}

void decode_q4_k(const uint8_t* in, float* out) {
  const GroupScales groups = group_scales(in);
  for (size_t group = 0; group < 8; ++group) {
    const uint8_t* from = in + 16 + group / 2 * 32;
    const int shift = static_cast<int>(group % 2 * 4);
    for (size_t j = 0; j < 32; ++j) {
      out[group * 32 + j] =
          groups.step[group] * static_cast<float>((from[j] >> shift) & 15) - groups.offset[group];
    }
  }
}

void decode_q5_k(const uint8_t* in, float* out) {
  const GroupScales groups = group_scales(in);
  const uint8_t* high = in + 16;
  for (size_t group = 0; group < 8; ++group) {
    const uint8_t* from = in + 48 + group / 2 * 32;
    const int shift = static_cast<int>(group % 2 * 4);
    for (size_t j = 0; j < 32; ++j) {
      const int code = ((from[j] >> shift) & 15) | (((high[j] >> group) & 1) << 4);
      out[group * 32 + j] = groups.step[group] * static_cast<float>(code) - groups.offset[group];
    }
  }
}

void decode_q6_k(const uint8_t* in, float* out) {
  const float scale = load_f16(in + 208);
  for (int64_t group = 0; group < 16; ++group) {
    const float step = scale * static_cast<float>(static_cast<int8_t>(in[192 + group]));
    const int64_t half = group / 8;
    const uint8_t* low = in + half * 64 + group % 4 * 16;
    const uint8_t* high = in + 128 + half * 32 + group % 2 * 16;
    const int low_shift = static_cast<int>(group % 8 / 4 * 4);
    const int high_shift = static_cast<int>(group % 8 / 2 * 2);
    for (int64_t j = 0; j < 16; ++j) {
      const int code = ((low[j] >> low_shift) & 15) | (((high[j] >> high_shift) & 3) << 4);
      out[group * 16 + j] = step * static_cast<float>(code - 32);
    }
  }
}

void decode_mxfp4(const uint8_t* in, float* out) {
  // Doubled values of E2M1, times half of the block's power of two: ggml's way, which has no -0.
  constexpr std::array<float, 16> kDoubled = {0, 1,  2,  3,  4,  6,  8,  12,
                                              0, -1, -2, -3, -4, -6, -8, -12};
  const uint32_t exponent = in[0];
  const auto half =
      std::bit_cast<float>(exponent < 2 ? 0x00200000U << exponent : (exponent - 1) << 23);
  for (size_t j = 0; j < kHalf; ++j) {
    out[j] = half * kDoubled[in[1 + j] & 15];
    out[j + kHalf] = half * kDoubled[in[1 + j] >> 4];
  }
}

template <int64_t kBytes, int64_t kElements, void (*kDecode)(const uint8_t*, float*)>
void each_block(const uint8_t* in, int64_t blocks, float* out) {
  for (int64_t i = 0; i < blocks; ++i) {
    kDecode(in + i * kBytes, out + i * kElements);
  }
}

template <typename T>
void numbers(const uint8_t* in, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = static_cast<float>(load<T>(in + i * static_cast<int64_t>(sizeof(T))));
  }
}

void f16_numbers(const uint8_t* in, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = f16_value(load<uint16_t>(in + 2 * i));
  }
}

void bf16_numbers(const uint8_t* in, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = bf16_to_f32(load<uint16_t>(in + 2 * i));
  }
}

}  // namespace

void decode_blocks(Type type, const std::byte* in, int64_t blocks, float* out) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(in);
  switch (type) {
    case Type::kF32:
      return numbers<float>(bytes, blocks, out);
    case Type::kF16:
      return f16_numbers(bytes, blocks, out);
    case Type::kQ4_0:
      return each_block<18, 32, decode_q4_0>(bytes, blocks, out);
    case Type::kQ4_1:
      return each_block<20, 32, decode_q4_1>(bytes, blocks, out);
    case Type::kQ5_0:
      return each_block<22, 32, decode_q5_0>(bytes, blocks, out);
    case Type::kQ5_1:
      return each_block<24, 32, decode_q5_1>(bytes, blocks, out);
    case Type::kQ8_0:
      return each_block<34, 32, decode_q8_0>(bytes, blocks, out);
    case Type::kQ2_K:
      return each_block<84, kSuper, decode_q2_k>(bytes, blocks, out);
    case Type::kQ3_K:
      return each_block<110, kSuper, decode_q3_k>(bytes, blocks, out);
    case Type::kQ4_K:
      return each_block<144, kSuper, decode_q4_k>(bytes, blocks, out);
    case Type::kQ5_K:
      return each_block<176, kSuper, decode_q5_k>(bytes, blocks, out);
    case Type::kQ6_K:
      return each_block<210, kSuper, decode_q6_k>(bytes, blocks, out);
    case Type::kI8:
      return numbers<int8_t>(bytes, blocks, out);
    case Type::kI16:
      return numbers<int16_t>(bytes, blocks, out);
    case Type::kI32:
      return numbers<int32_t>(bytes, blocks, out);
    case Type::kI64:
      return numbers<int64_t>(bytes, blocks, out);
    case Type::kF64:
      return numbers<double>(bytes, blocks, out);
    case Type::kBF16:
      return bf16_numbers(bytes, blocks, out);
    case Type::kMXFP4:
      return each_block<17, 32, decode_mxfp4>(bytes, blocks, out);
  }
  CHECK_MSG(false, "type {}", static_cast<uint32_t>(type));
}

}  // namespace nibble::gguf
