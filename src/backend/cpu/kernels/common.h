#pragma once

// Helpers over the vector vocabulary. Needs one simd_*.h included before.

#include <cstddef>
#include <cstdint>

#include "backend/cpu/kernel_table.h"

namespace nibble::cpu {
namespace {

inline F32x16 load_bf16(const uint8_t* p) {
  return Simd::from_bits(Simd::shift_left<16>(Simd::load_u16(p)));
}

/// The first `count` (0 to 16) lanes; the others are 0.
inline F32x16 load_some(const float* p, int64_t count) {
  float lanes[16] = {};
  __builtin_memcpy(lanes, p, static_cast<size_t>(count) * 4);
  return Simd::load(lanes);
}

inline void store_some(float* p, int64_t count, F32x16 value) {
  float lanes[16];
  Simd::store(lanes, value);
  __builtin_memcpy(p, lanes, static_cast<size_t>(count) * 4);
}

/// body(offset, lanes) for 0, 16, 32 ... n.
template <typename Body>
[[gnu::always_inline]] inline void in_vectors(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    body(i, int64_t{16});
  }
  if (i < n) {
    body(i, n - i);
  }
}

inline F32x16 load_lanes(const float* p, int64_t lanes) {
  return lanes == 16 ? Simd::load(p) : load_some(p, lanes);
}

inline void store_lanes(float* p, int64_t lanes, F32x16 value) {
  if (lanes == 16) {
    Simd::store(p, value);
  } else {
    store_some(p, lanes, value);
  }
}

/// The upper halves of the bits, as those of a BF16 number.
inline F32x16 upper_halves(I32x16 bits) {
  return Simd::from_bits(Simd::and_int(bits, Simd::set_int(static_cast<int>(0xffff0000U))));
}

/// The bits plus what carries into the upper half, so that it is rounded, ties to even.
inline I32x16 round_upper_halves(I32x16 bits) {
  const I32x16 odd = Simd::and_int(Simd::shift_right<16>(bits), Simd::set_int(1));
  return Simd::add_int(Simd::add_int(bits, Simd::set_int(0x7fff)), odd);
}

inline F32x16 magnitude(F32x16 x) {
  return Simd::from_bits(Simd::and_int(Simd::bits(x), Simd::set_int(0x7fffffff)));
}

/// A number, not NaN, rounded to BF16, ties to even.
inline F32x16 number_as_bf16(F32x16 v) { return upper_halves(round_upper_halves(Simd::bits(v))); }

/// Rounded to BF16, ties to even; NaN stays NaN.
inline F32x16 nearest_bf16(F32x16 v) {
  const I32x16 bits = Simd::bits(v);
  const F32x16 rounded = Simd::from_bits(round_upper_halves(bits));
  const F32x16 quiet = Simd::from_bits(Simd::or_int(bits, Simd::set_int(0x400000)));
  // max takes its second operand when that is NaN, which is less than nothing.
  const F32x16 at_least_0 = Simd::max(Simd::set(0.0F), v);
  return upper_halves(Simd::bits(Simd::select_less(Simd::set(-1.0F), at_least_0, rounded, quiet)));
}

/// Lanes i .. i + lanes - 1 of a row.
[[gnu::always_inline]] inline F32x16 load_numbers(ConstNumbers x, int64_t i, int64_t lanes) {
  if (x.type == Element::kF32) {
    return load_lanes(static_cast<const float*>(x.data) + i, lanes);
  }
  const uint8_t* p = static_cast<const uint8_t*>(x.data) + 2 * i;
  if (lanes == 16) {
    return load_bf16(p);
  }
  uint8_t bytes[32] = {};
  __builtin_memcpy(bytes, p, static_cast<size_t>(lanes) * 2);
  return load_bf16(bytes);
}

[[gnu::always_inline]] inline void store_numbers(Numbers y,
                                                 int64_t i,
                                                 int64_t lanes,
                                                 F32x16 value) {
  if (y.type == Element::kF32) {
    return store_lanes(static_cast<float*>(y.data) + i, lanes, value);
  }
  uint8_t* p = static_cast<uint8_t*>(y.data) + 2 * i;
  if (lanes == 16) {
    return Simd::store_bf16(p, value);
  }
  uint8_t bytes[32];
  Simd::store_bf16(bytes, value);
  __builtin_memcpy(p, bytes, static_cast<size_t>(lanes) * 2);
}

/// e^x: 0 below -87 (before the result would be subnormal), e^88 above 88; NaN stays NaN.
/// x = n ln 2 + r, |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7, whose remainder
/// r^8/8! is below 6e-9; ln 2 is split in two so that n * high is exact.
inline F32x16 exp(F32x16 x) {
  const F32x16 low = Simd::set(-87.0F);
  const F32x16 clamped = Simd::max(low, Simd::min(Simd::set(88.0F), x));
  const I32x16 n = Simd::to_int(Simd::mul(clamped, Simd::set(1.44269504F)));
  const F32x16 nf = Simd::to_float(n);
  F32x16 r = Simd::fma(nf, Simd::set(-0.693359375F), clamped);
  r = Simd::fma(nf, Simd::set(2.12194440e-4F), r);
  F32x16 p = Simd::set(1.0F / 5040.0F);
  p = Simd::fma(p, r, Simd::set(1.0F / 720.0F));
  p = Simd::fma(p, r, Simd::set(1.0F / 120.0F));
  p = Simd::fma(p, r, Simd::set(1.0F / 24.0F));
  p = Simd::fma(p, r, Simd::set(1.0F / 6.0F));
  p = Simd::fma(p, r, Simd::set(0.5F));
  p = Simd::fma(p, r, Simd::set(1.0F));
  p = Simd::fma(p, r, Simd::set(1.0F));
  const I32x16 exponent = Simd::shift_left<23>(Simd::add_int(n, Simd::set_int(127)));
  const F32x16 value = Simd::mul(p, Simd::from_bits(exponent));
  return Simd::select_less(x, low, Simd::set(0.0F), value);
}

inline float sqrt_f32(float x) { return __builtin_sqrtf(x); }

}  // namespace
}  // namespace nibble::cpu
