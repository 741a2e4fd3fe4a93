#include "checkpoint/source_kernels.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"
#include "base/f16.h"

// Loops of fixed length over local arrays, which compilers turn into vector code. Each function
// exists twice, for the baseline and for AVX2: integer operations, exact conversions and single
// products give the same bits in both.

#if defined(__x86_64__)
#define NIBBLE_WIDE [[gnu::target("avx2")]]
#else
#define NIBBLE_WIDE
#endif

namespace nibble {
namespace {

constexpr int64_t kBlock = 64;

bool use_wide() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") != 0;
#else
  return false;
#endif
}

[[gnu::always_inline]] inline void nibbles_block(const std::byte* in, NibbleForm form, float* out) {
  uint32_t words[kBlock / 8];
  std::memcpy(words, in, sizeof(words));
  for (uint32_t& word : words) {
    word = canonical_word(form, word);
  }
  uint8_t bytes[kBlock / 2];
  std::memcpy(bytes, words, sizeof(bytes));
  int8_t codes[kBlock];
  for (int64_t i = 0; i < kBlock / 2; ++i) {
    codes[2 * i] = static_cast<int8_t>((bytes[i] & 15) - 8);
    codes[2 * i + 1] = static_cast<int8_t>((bytes[i] >> 4) - 8);
  }
  for (int64_t i = 0; i < kBlock; ++i) {
    out[i] = static_cast<float>(codes[i]);
  }
}

// A small float of `kBits` magnitude bits, kMantissa of them mantissa, sign above. `kBias`: 127
// minus its own bias. Both cases are computed, so that it can be vector code.
template <int kBits, int kMantissa, uint32_t kBias>
[[gnu::always_inline]] inline float small_float(uint32_t code) {
  constexpr uint32_t kNormal = 1U << kMantissa;
  constexpr float kUnit = std::bit_cast<float>((kBias + 1 - kMantissa) << 23);  // of a subnormal
  const uint32_t magnitude = code & ((1U << kBits) - 1);
  const uint32_t sign = (code >> kBits & 1U) << 31;
  const uint32_t normal = (magnitude << (23 - kMantissa)) + (kBias << 23);
  const auto small =
      std::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * kUnit);
  return std::bit_cast<float>(sign | (magnitude < kNormal ? small : normal));
}

[[gnu::always_inline]] inline void e4m3_block(const std::byte* in, float* out) {
  uint8_t bytes[kBlock];
  std::memcpy(bytes, in, sizeof(bytes));
  for (int64_t i = 0; i < kBlock; ++i) {
    const float value = small_float<7, 3, 120>(bytes[i]);
    const uint32_t nan = (bytes[i] & 0x7fU) == 0x7fU ? 0x7fc00000U : 0U;
    out[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(value) | nan);
  }
}

[[gnu::always_inline]] inline void e2m1_block(const std::byte* in, float* out) {
  uint8_t bytes[kBlock / 2];
  std::memcpy(bytes, in, sizeof(bytes));
  uint8_t codes[kBlock];
  for (int64_t i = 0; i < kBlock / 2; ++i) {
    codes[2 * i] = bytes[i] & 15;
    codes[2 * i + 1] = bytes[i] >> 4;
  }
  for (int64_t i = 0; i < kBlock; ++i) {
    out[i] = small_float<3, 1, 126>(codes[i]);
  }
}

[[gnu::always_inline]] inline void int8_block(const std::byte* in, uint8_t flip, float* out) {
  uint8_t bytes[kBlock];
  std::memcpy(bytes, in, sizeof(bytes));
  for (int64_t i = 0; i < kBlock; ++i) {
    out[i] = static_cast<float>(static_cast<int8_t>(bytes[i] ^ flip));
  }
}

[[gnu::always_inline]] inline void block_of(CodeForm form,
                                            NibbleForm nibbles,
                                            const std::byte* in,
                                            float* out) {
  switch (form) {
    case CodeForm::kNibbles:
      return nibbles_block(in, nibbles, out);
    case CodeForm::kInt8:
      return int8_block(in, 0, out);
    case CodeForm::kInt8Offset:
      return int8_block(in, 0x80, out);
    case CodeForm::kE4M3:
      return e4m3_block(in, out);
    case CodeForm::kE2M1:
      return e2m1_block(in, out);
  }
}

[[gnu::always_inline]] inline bool is_half_byte(CodeForm form) {
  return form == CodeForm::kNibbles || form == CodeForm::kE2M1;
}

[[gnu::always_inline]] inline void levels_of(
    CodeForm form, NibbleForm nibbles, const std::byte* in, int64_t count, float* out) {
  const int64_t shift = is_half_byte(form) ? 1 : 0;
  int64_t at = 0;
  for (; at + kBlock <= count; at += kBlock) {
    block_of(form, nibbles, in + (at >> shift), out + at);
  }
  if (at < count) {
    const int64_t rest = count - at;
    const int64_t unit = form == CodeForm::kNibbles ? 8 : 1 + shift;
    std::byte bytes[kBlock] = {};
    float block[kBlock];
    std::memcpy(bytes, in + (at >> shift),
                static_cast<size_t>((rest + unit - 1) / unit * unit) >> shift);
    block_of(form, nibbles, bytes, block);
    std::memcpy(out + at, block, static_cast<size_t>(rest) * sizeof(float));
  }
}

constexpr int64_t kHalf = kBlock / 2;  // numbers that share a scale at least

/// The scale of one half of a block after another, without a division.
struct ScaleCursor {
  const float* scale = nullptr;
  int64_t halves = 0;  // in a group
  int64_t used = 0;

  [[gnu::always_inline]] float next() {
    const float value = *scale;
    if (++used == halves) {
      used = 0;
      ++scale;
    }
    return value;
  }
};

[[gnu::always_inline]] inline void scaled_block(
    const ScaledCodes& codes, const std::byte* in, float low, float high, float* out) {
  float block[kBlock];
  block_of(codes.form, codes.nibbles, in, block);
  for (int64_t i = 0; i < kHalf; ++i) {
    out[i] = block[i] * low;
  }
  for (int64_t i = kHalf; i < kBlock; ++i) {
    out[i] = block[i] * high;
  }
}

[[gnu::always_inline]] inline void scaled_of(const ScaledCodes& codes, float* out) {
  const int64_t shift = is_half_byte(codes.form) ? 1 : 0;
  ScaleCursor cursor{codes.scales, (codes.group_size + kHalf - 1) / kHalf};
  int64_t at = 0;
  for (; at + kBlock <= codes.count; at += kBlock) {
    const float low = cursor.next();
    scaled_block(codes, codes.in + (at >> shift), low, cursor.next(), out + at);
  }
  if (at < codes.count) {
    const int64_t rest = codes.count - at;
    const int64_t unit = codes.form == CodeForm::kNibbles ? 8 : 1 + shift;
    std::byte bytes[kBlock] = {};
    float block[kBlock];
    std::memcpy(bytes, codes.in + (at >> shift),
                static_cast<size_t>((rest + unit - 1) / unit * unit) >> shift);
    const float low = cursor.next();
    scaled_block(codes, bytes, low, rest > kHalf ? cursor.next() : low, block);
    std::memcpy(out + at, block, static_cast<size_t>(rest) * sizeof(float));
  }
}

[[gnu::always_inline]] inline void across_of(NibbleForm nibbles,
                                             const AcrossBlock& block,
                                             float* out) {
  for (int64_t begin = 0; begin < block.count; begin += kBlock) {
    const int64_t size = std::min(kBlock, block.count - begin);
    uint32_t words[kBlock] = {};
    for (int64_t i = 0; i < size; ++i) {
      std::memcpy(&words[i], block.in + (begin + i) * block.stride, 4);
    }
    for (uint32_t& word : words) {
      word = canonical_word(nibbles, word);
    }
    for (int e = block.first; e < block.last; ++e) {
      float levels[kBlock];
      for (int64_t i = 0; i < kBlock; ++i) {
        levels[i] = static_cast<float>(static_cast<int32_t>((words[i] >> (4 * e)) & 15U) - 8);
      }
      std::memcpy(out + (e - block.first) * block.row_stride + begin, levels,
                  static_cast<size_t>(size) * sizeof(float));
    }
  }
}

[[gnu::always_inline]] inline void scales_of(
    const float* scales, const float* zeros, int64_t group_size, int64_t count, float* x) {
  for (int64_t begin = 0, g = 0; begin < count; begin += group_size, ++g) {
    const int64_t end = std::min(begin + group_size, count);
    const float scale = scales[g];
    if (zeros == nullptr) {
      for (int64_t i = begin; i < end; ++i) {
        x[i] *= scale;
      }
    } else {
      const float zero = zeros[g];
      for (int64_t i = begin; i < end; ++i) {
        x[i] = (x[i] - zero) * scale;
      }
    }
  }
}

[[gnu::always_inline]] inline float f32_from_f16(uint16_t bits) {
  const uint32_t special = (bits & 0x7fffU) >= 0x7c00U ? 0x7f800000U : 0U;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(small_float<15, 10, 112>(bits)) | special);
}

// One vector at a time: an array between the two types would be stored narrow and loaded wide,
// which no processor forwards (measured: 3.5 times the time). Pages are fetched ahead, since the
// processor's own streams end at 4 KiB.
[[gnu::always_inline]] inline void bf16_of(const std::byte* in, int64_t count, float* out) {
  using Halves [[gnu::vector_size(16)]] = uint16_t;
  using Words [[gnu::vector_size(32)]] = uint32_t;
  constexpr int64_t kLanes = 8;
  constexpr int64_t kAhead = 2048;  // bytes
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) {
    Halves halves;
    std::memcpy(&halves, in + at * 2, sizeof(halves));
    if (at % 32 == 0) {
      __builtin_prefetch(in + at * 2 + kAhead);
    }
    const Words words = __builtin_convertvector(halves, Words) << 16;
    std::memcpy(out + at, &words, sizeof(words));
  }
  for (; at < count; ++at) {
    uint16_t half = 0;
    std::memcpy(&half, in + at * 2, 2);
    out[at] = bf16_to_f32(half);
  }
}

[[gnu::always_inline]] inline void f16_of(const std::byte* in, int64_t count, float* out) {
  for (int64_t at = 0; at < count; at += kBlock) {
    const auto size = static_cast<size_t>(std::min(kBlock, count - at));
    uint16_t block[kBlock] = {};
    float values[kBlock];
    std::memcpy(block, in + at * 2, size * 2);
    for (int64_t i = 0; i < kBlock; ++i) {
      values[i] = f32_from_f16(block[i]);
    }
    std::memcpy(out + at, values, size * 4);
  }
}

NIBBLE_WIDE void levels_wide(
    CodeForm form, NibbleForm nibbles, const std::byte* in, int64_t count, float* out) {
  levels_of(form, nibbles, in, count, out);
}

NIBBLE_WIDE void scaled_wide(const ScaledCodes& codes, float* out) { scaled_of(codes, out); }

NIBBLE_WIDE void across_wide(NibbleForm nibbles, const AcrossBlock& block, float* out) {
  across_of(nibbles, block, out);
}

NIBBLE_WIDE void scales_wide(
    const float* scales, const float* zeros, int64_t group_size, int64_t count, float* x) {
  scales_of(scales, zeros, group_size, count, x);
}

NIBBLE_WIDE void halves_wide(DType dtype, const std::byte* in, int64_t count, float* out) {
  dtype == DType::kF16 ? f16_of(in, count, out) : bf16_of(in, count, out);
}

void halves_narrow(DType dtype, const std::byte* in, int64_t count, float* out) {
  dtype == DType::kF16 ? f16_of(in, count, out) : bf16_of(in, count, out);
}

}  // namespace

void decode_levels(
    CodeForm form, NibbleForm nibbles, const std::byte* in, int64_t count, float* out) {
  use_wide() ? levels_wide(form, nibbles, in, count, out)
             : levels_of(form, nibbles, in, count, out);
}

void decode_scaled(const ScaledCodes& codes, float* out) {
  use_wide() ? scaled_wide(codes, out) : scaled_of(codes, out);
}

void decode_across(NibbleForm nibbles, const AcrossBlock& block, float* out) {
  use_wide() ? across_wide(nibbles, block, out) : across_of(nibbles, block, out);
}

void apply_scales(
    const float* scales, const float* zeros, int64_t group_size, int64_t count, float* x) {
  use_wide() ? scales_wide(scales, zeros, group_size, count, x)
             : scales_of(scales, zeros, group_size, count, x);
}

void apply_scales_by_index(
    const float* scales, const float* zeros, const int32_t* index, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t g = index[i];
    x[i] = (x[i] - (zeros == nullptr ? 0.0F : zeros[g])) * scales[g];
  }
}

bool has_e4m3_nan(const std::byte* in, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    uint8_t block[kBlock] = {};
    std::memcpy(block, in + begin, static_cast<size_t>(std::min(kBlock, count - begin)));
    uint8_t found = 0;
    for (const uint8_t byte : block) {
      found |= static_cast<uint8_t>((byte & 0x7fU) == 0x7fU);
    }
    if (found != 0) {
      return true;
    }
  }
  return false;
}

void decode_plain(DType dtype, const std::byte* in, int64_t count, float* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, in, static_cast<size_t>(count) * 4);
    return;
  }
  CHECK_MSG(dtype == DType::kF16 || dtype == DType::kBF16, "{} is no plain type",
            dtype_name(dtype));
  use_wide() ? halves_wide(dtype, in, count, out) : halves_narrow(dtype, in, count, out);
}

}  // namespace nibble
