#pragma once

#include <cstddef>
#include <cstdint>

#include "base/f16.h"

// The vector vocabulary in plain C++: 16 lanes whose results define those of the other files.
// Included by one source file; the unnamed namespace keeps its symbols there.
namespace nibble::cpu {
namespace {

struct F32x16 {
  float v[16];
};
struct I32x16 {
  uint32_t v[16];
};

struct Simd {
  static constexpr int64_t kNearBytes = 2048;
  static constexpr int64_t kFarBytes = 0;
  static constexpr bool kFewRegisters = false;
  static constexpr int kShortRows = 0;
  static constexpr int32_t kInt8Offset = 128;  // of INT8 activations for INT8 weights
  static constexpr int kPairRows = 0;
  // Rows of activations that share decoded weights: one, or compiling takes minutes.
  static constexpr int kRows = 1;
  static constexpr int kFixedRows = 1;

  template <typename Fn>
  static F32x16 f(Fn fn) {
    F32x16 r;
    for (int i = 0; i < 16; ++i) {
      r.v[i] = fn(i);
    }
    return r;
  }
  template <typename Fn>
  static I32x16 n(Fn fn) {
    I32x16 r;
    for (int i = 0; i < 16; ++i) {
      r.v[i] = static_cast<uint32_t>(fn(i));
    }
    return r;
  }

  static F32x16 set(float x) {
    return f([&](int) { return x; });
  }
  static F32x16 load(const float* p) {
    return f([&](int i) { return p[i]; });
  }
  static void store(float* p, F32x16 a) { __builtin_memcpy(p, a.v, 64); }
  static F32x16 add(F32x16 a, F32x16 b) {
    return f([&](int i) { return a.v[i] + b.v[i]; });
  }
  static F32x16 sub(F32x16 a, F32x16 b) {
    return f([&](int i) { return a.v[i] - b.v[i]; });
  }
  static F32x16 mul(F32x16 a, F32x16 b) {
    return f([&](int i) { return a.v[i] * b.v[i]; });
  }
  static F32x16 div(F32x16 a, F32x16 b) {
    return f([&](int i) { return a.v[i] / b.v[i]; });
  }
  /// a * b + c, rounded once. The product is exact in F64; rounding their sum to F64 first changes
  /// the result only where that sum lies between two F32 numbers, or below the normal ones. A call
  /// of the library for every lane would take most of a kernel's time.
  static float fma(float a, float b, float c) {
    const double sum = static_cast<double>(a) * b + c;
    uint64_t bits = 0;
    __builtin_memcpy(&bits, &sum, sizeof bits);
    const bool halfway = (bits & 0x1fffffff) == 0x10000000;
    return halfway || (sum != 0 && __builtin_fabs(sum) < 0x1p-125) ? __builtin_fmaf(a, b, c)
                                                                   : static_cast<float>(sum);
  }
  static F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return f([&](int i) { return fma(a.v[i], b.v[i], c.v[i]); });
  }
  /// a < b ? a : b, so b when either is NaN.
  static F32x16 min(F32x16 a, F32x16 b) {
    return f([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  /// a > b ? a : b, so b when either is NaN.
  static F32x16 max(F32x16 a, F32x16 b) {
    return f([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  /// a < b ? yes : no.
  static F32x16 select_less(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
    return f([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
  }
  static float reduce_add(F32x16 a) {
    return tree(a, [](float x, float y) { return x + y; });
  }
  static float reduce_max(F32x16 a) {
    return tree(a, [](float x, float y) { return x > y ? x : y; });
  }
  static float reduce_min(F32x16 a) {
    return tree(a, [](float x, float y) { return x < y ? x : y; });
  }
  template <typename Fn>
  static float tree(F32x16 a, Fn fn) {
    for (int width = 8; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) {
        a.v[i] = fn(a.v[i], a.v[i + width]);
      }
    }
    return a.v[0];
  }

  static I32x16 set_int(int32_t x) {
    return n([&](int) { return x; });
  }
  static I32x16 load_int(const void* p) {
    I32x16 r;
    __builtin_memcpy(r.v, p, 64);
    return r;
  }
  /// The first `count` (1 to 15) lanes; the others are 0.
  static I32x16 load_words(const void* p, int64_t count) {
    I32x16 r = {};
    __builtin_memcpy(r.v, p, static_cast<size_t>(count) * 4);
    return r;
  }
  static void store_int(void* p, I32x16 a) { __builtin_memcpy(p, a.v, 64); }
  static I32x16 add_int(I32x16 a, I32x16 b) {
    return n([&](int i) { return a.v[i] + b.v[i]; });
  }
  static I32x16 sub_int(I32x16 a, I32x16 b) {
    return n([&](int i) { return a.v[i] - b.v[i]; });
  }
  static I32x16 and_int(I32x16 a, I32x16 b) {
    return n([&](int i) { return a.v[i] & b.v[i]; });
  }
  static I32x16 or_int(I32x16 a, I32x16 b) {
    return n([&](int i) { return a.v[i] | b.v[i]; });
  }
  template <int kBits>
  static I32x16 shift_left(I32x16 a) {
    return n([&](int i) { return a.v[i] << kBits; });
  }
  template <int kBits>
  static I32x16 shift_right(I32x16 a) {
    return n([&](int i) { return a.v[i] >> kBits; });
  }
  /// Of signed integers.
  template <int kBits>
  static I32x16 shift_right_signed(I32x16 a) {
    return n([&](int i) { return static_cast<int32_t>(a.v[i]) >> kBits; });
  }
  static int32_t reduce_add_int(I32x16 a) {
    uint32_t sum = 0;
    for (const uint32_t x : a.v) {
      sum += x;
    }
    return static_cast<int32_t>(sum);
  }
  static int32_t reduce_max_int(I32x16 a) {
    int32_t top = static_cast<int32_t>(a.v[0]);
    for (const uint32_t x : a.v) {
      top = static_cast<int32_t>(x) > top ? static_cast<int32_t>(x) : top;
    }
    return top;
  }
  static I32x16 xor_int(I32x16 a, I32x16 b) {
    return n([&](int i) { return a.v[i] ^ b.v[i]; });
  }
  static I32x16 max_int(I32x16 a, I32x16 b) {
    return n([&](int i) {
      return static_cast<int32_t>(a.v[i]) > static_cast<int32_t>(b.v[i]) ? a.v[i] : b.v[i];
    });
  }
  /// Of the halves of each lane, as unsigned numbers.
  static I32x16 max_u16(I32x16 a, I32x16 b) {
    return n([&](int i) {
      const uint32_t low = (a.v[i] & 0xffffU) > (b.v[i] & 0xffffU) ? a.v[i] : b.v[i];
      const uint32_t high = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
      return (high & 0xffff0000U) | (low & 0xffffU);
    });
  }

  /// Lane j of row i becomes lane i of row j.
  static F32x16 evens(const F32x16& a, const F32x16& b) { return every_second(a, b, 0); }
  static F32x16 odds(const F32x16& a, const F32x16& b) { return every_second(a, b, 1); }
  static F32x16 every_second(const F32x16& a, const F32x16& b, int first) {
    F32x16 r;
    for (int i = 0; i < 8; ++i) {
      r.v[i] = a.v[2 * i + first];
      r.v[8 + i] = b.v[2 * i + first];
    }
    return r;
  }
  static void transpose(F32x16 (&rows)[16]) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < i; ++j) {
        const float lower = rows[i].v[j];
        rows[i].v[j] = rows[j].v[i];
        rows[j].v[i] = lower;
      }
    }
  }

  /// (a & b) | c of each lane's bits.
  static F32x16 and_or(I32x16 a, F32x16 b, F32x16 c) {
    return from_bits(or_int(and_int(a, bits(b)), bits(c)));
  }
  /// The larger bits, as unsigned numbers: above all others for NaN.
  static F32x16 max_bits(F32x16 a, F32x16 b) {
    const I32x16 x = bits(a);
    const I32x16 y = bits(b);
    return from_bits(n([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; }));
  }
  /// Whether any lane's bits exceed those of a positive `limit`.
  static bool any_bits_above(F32x16 a, float limit) {
    const auto top = __builtin_bit_cast(uint32_t, limit);
    bool above = false;
    for (const uint32_t x : bits(a).v) {
      above = above || x > top;
    }
    return above;
  }

  static I32x16 bits(F32x16 a) { return __builtin_bit_cast(I32x16, a); }
  static F32x16 from_bits(I32x16 a) { return __builtin_bit_cast(F32x16, a); }
  static F32x16 to_float(I32x16 a) {
    return f([&](int i) { return static_cast<float>(static_cast<int32_t>(a.v[i])); });
  }
  /// Nearest, ties to even; INT32_MIN for NaN and what does not fit.
  static I32x16 to_int(F32x16 a) {
    return n([&](int i) {
      const bool fits = a.v[i] >= -0x1p31F && a.v[i] < 0x1p31F;
      return fits ? static_cast<int32_t>(__builtin_rintf(a.v[i])) : INT32_MIN;
    });
  }

  static I32x16 load_u8(const uint8_t* p) {
    return n([&](int i) { return p[i]; });
  }
  static I32x16 load_s8(const uint8_t* p) {
    return n([&](int i) { return static_cast<int8_t>(p[i]); });
  }
  static I32x16 load_u16(const uint8_t* p) {
    uint16_t h[16];
    __builtin_memcpy(h, p, 32);
    return n([&](int i) { return h[i]; });
  }
  static F32x16 load_f16(const uint8_t* p) {
    const I32x16 h = load_u16(p);
    return f([&](int i) { return f16_to_f32(static_cast<uint16_t>(h.v[i])); });
  }
  /// Sixteen nibbles of eight bytes, low nibble first.
  static I32x16 load_u4(const uint8_t* p) {
    return n([&](int i) { return (p[i / 2] >> (i % 2 * 4)) & 15; });
  }
  /// (codes * step + start) >> 8 of signed 16-bit halves.
  static I32x16 steps_s16(I32x16 codes, I32x16 step, I32x16 start) {
    return n([&](int i) {
      uint32_t halves = 0;
      for (int h = 0; h < 32; h += 16) {
        const auto sum =
            static_cast<int16_t>((codes.v[i] >> h) * (step.v[i] >> h) + (start.v[i] >> h));
        halves |= static_cast<uint32_t>(static_cast<uint16_t>(sum >> 8)) << h;
      }
      return halves;
    });
  }
  /// The lower 16 bits of the products of 16-bit halves.
  static I32x16 mul_u16(I32x16 a, I32x16 b) {
    return n([&](int i) {
      const uint32_t low = (a.v[i] & 0xffffU) * (b.v[i] & 0xffffU) & 0xffffU;
      return low | (a.v[i] >> 16) * (b.v[i] >> 16) << 16;
    });
  }
  /// Nibbles 3 and 7 of each word, in its halves.
  static I32x16 upper_nibbles(I32x16 words) {
    return and_int(shift_right<12>(words), set_int(0x000f000f));
  }
  using CodeTable = F32x16;
  /// Of 16 BF16 numbers.
  static CodeTable code_table(F32x16 numbers) { return numbers; }
  /// The numbers of 32 nibbles.
  static void look_up_u4(const uint8_t* p, const CodeTable& table, float* out) {
    for (int i = 0; i < 32; ++i) {
      out[i] = table.v[(p[i / 2] >> (i % 2 * 4)) & 15];
    }
  }
  /// Sixteen E4M3 bytes times 2^-8 (their bits read as an f16); NaN codes excluded.
  static F32x16 load_fp8(const uint8_t* p) {
    return f([&](int i) {
      return f16_to_f32(static_cast<uint16_t>(((p[i] & 0x80) << 8) | ((p[i] & 0x7f) << 7)));
    });
  }
  /// Lanes that fit 16 bits.
  static void store_s16(uint8_t* p, I32x16 a) {
    for (int i = 0; i < 16; ++i) {
      const auto half = static_cast<uint16_t>(a.v[i]);
      __builtin_memcpy(p + 2 * i, &half, 2);
    }
  }
  /// Low bytes.
  static void store_u8(uint8_t* p, I32x16 a) {
    for (int i = 0; i < 16; ++i) {
      p[i] = static_cast<uint8_t>(a.v[i]);
    }
  }
  /// Four times 16 lanes in -128 .. 127 as bytes, each plus `offset`.
  static void store_bytes(uint8_t* p, const I32x16 (&a)[4], uint8_t offset) {
    for (int i = 0; i < 4; ++i) {
      store_u8(p + 16 * i, add_int(a[i], set_int(offset)));
    }
  }
  static void store_bf16(uint8_t* p, F32x16 a) {
    for (int i = 0; i < 16; ++i) {
      const uint16_t half = f32_to_bf16(a.v[i]);
      __builtin_memcpy(p + 2 * i, &half, 2);
    }
  }
  /// Nibble kIndex of each word, minus 8.
  template <int kIndex>
  static F32x16 nibble(I32x16 word) {
    return f([&](int i) {
      return static_cast<float>(static_cast<int>((word.v[i] >> (4 * kIndex)) & 15U) - 8);
    });
  }
  /// E2M1 at nibble kIndex of each lane.
  template <int kIndex>
  static F32x16 fp4(I32x16 word) {
    constexpr float kMagnitudes[] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
    return f([&](int i) {
      const uint32_t code = (word.v[i] >> (4 * kIndex)) & 15U;
      return code < 8 ? kMagnitudes[code] : -kMagnitudes[code - 8];
    });
  }
  /// The same, not read from memory again for each use.
  static I32x16 in_register(I32x16 a) { return a; }
  /// acc + the products of four unsigned bytes of u with four signed bytes of s, exact mod 2^32.
  static I32x16 dot_int8(I32x16 acc, I32x16 u, I32x16 s) {
    return n([&](int i) {
      uint32_t sum = acc.v[i];
      for (int b = 0; b < 32; b += 8) {
        const auto x = static_cast<int32_t>((u.v[i] >> b) & 255U);
        const auto y = static_cast<int32_t>(static_cast<int8_t>(s.v[i] >> b));
        sum += static_cast<uint32_t>(x * y);
      }
      return sum;
    });
  }
  /// acc + the products of two 16-bit numbers of a with those of b.
  static I32x16 dot_s16(I32x16 acc, I32x16 a, I32x16 b) {
    return n([&](int i) {
      uint32_t sum = acc.v[i];
      for (int h = 0; h < 32; h += 16) {
        const int32_t x = static_cast<int16_t>(a.v[i] >> h);
        const int32_t y = static_cast<int16_t>(b.v[i] >> h);
        sum += static_cast<uint32_t>(x * y);
      }
      return sum;
    });
  }
  /// The same where u's bytes are at most 15.
  static I32x16 dot_u4s8(I32x16 acc, I32x16 u, I32x16 s) { return dot_int8(acc, u, s); }
};

}  // namespace
}  // namespace nibble::cpu
