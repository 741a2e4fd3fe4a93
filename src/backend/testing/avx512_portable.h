#pragma once

#if !defined(__clang__)  // GCC 12 fails to replace parts of SIMDe's vectors by scalars
#pragma GCC optimize("no-tree-sra")
#endif

// AVX-512 intrinsics for processors that have AVX2 only, by SIMDe: source files that include this
// first are compiled for AVX2. For tests of the AVX-512 and AMX kernels where these cannot run.

#include <cstdint>
#include <cstring>

#include <immintrin.h>

// NOLINTBEGIN(bugprone-reserved-identifier)
#define NIBBLE_PORTABLE_AVX512
#define SIMDE_X86_AVX512F_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512BW_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512DQ_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512VBMI_ENABLE_NATIVE_ALIASES
#define SIMDE_X86_AVX512VNNI_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>

#define __m512 simde__m512
#define __m512i simde__m512i
#define __m512bh simde__m512i

// What SIMDe 0.7.4 lacks, or has with mistakes.

namespace nibble::cpu::portable {
namespace {

struct Halves {
  __m256i low;
  __m256i high;
};

/// A vector of 64 bytes, or halves of it, as another such type.
template <typename To, typename From>
To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline __m512i wider_words(__m256i a) {
  return as<__m512i>(Halves{_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
                            _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))});
}
inline __m512i wider_bytes(__m128i a) {
  return as<__m512i>(Halves{_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))});
}
inline __m512i bytes_as_halves(__m256i a) {
  return as<__m512i>(Halves{_mm256_cvtepu8_epi16(_mm256_castsi256_si128(a)),
                            _mm256_cvtepu8_epi16(_mm256_extracti128_si256(a, 1))});
}
inline __m512i shifted_signed(__m512i a, int bits) {
  const auto halves = as<Halves>(a);
  return as<__m512i>(
      Halves{_mm256_srai_epi32(halves.low, bits), _mm256_srai_epi32(halves.high, bits)});
}
inline __m512i wider_signed_bytes(__m128i a) {
  return as<__m512i>(Halves{_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))});
}
inline __m512i bytes_as_words(__m128i a) {
  return as<__m512i>(Halves{_mm256_cvtepu8_epi64(a), _mm256_cvtepu8_epi64(_mm_srli_si128(a, 4))});
}
inline __m512i multiply_pairs(__m512i a, __m512i b) {
  const auto x = as<Halves>(a);
  const auto y = as<Halves>(b);
  return as<__m512i>(Halves{_mm256_madd_epi16(x.low, y.low), _mm256_madd_epi16(x.high, y.high)});
}
inline __m512 to_floats(__m512i a) {
  const auto x = as<Halves>(a);
  return as<__m512>(Halves{_mm256_castps_si256(_mm256_cvtepi32_ps(x.low)),
                           _mm256_castps_si256(_mm256_cvtepi32_ps(x.high))});
}
inline __m512i to_integers(__m512 a) {
  const auto x = as<Halves>(a);
  return as<__m512i>(Halves{_mm256_cvtps_epi32(_mm256_castsi256_ps(x.low)),
                            _mm256_cvtps_epi32(_mm256_castsi256_ps(x.high))});
}
inline __m512 halves_to_floats(__m256i a) {
  return as<__m512>(Halves{_mm256_castps_si256(_mm256_cvtph_ps(_mm256_castsi256_si128(a))),
                           _mm256_castps_si256(_mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)))});
}

template <typename Word>
struct Lanes {
  Word at[64 / sizeof(Word)];
};

/// The low parts of 16 lanes.
template <typename Part, typename To>
To narrowed(__m512i a) {
  const auto lanes = as<Lanes<uint32_t>>(a);
  Part parts[16];
  for (int i = 0; i < 16; ++i) {
    parts[i] = static_cast<Part>(lanes.at[i]);
  }
  return as<To>(parts);
}

/// The first elements, where the mask says so; memory of the others is not read.
template <typename To, typename Word, typename Mask>
To masked_load(Mask mask, const void* from) {
  Word words[sizeof(To) / sizeof(Word)] = {};
  for (size_t i = 0; i < sizeof(To) / sizeof(Word); ++i) {
    if ((mask >> i & 1) != 0) {
      std::memcpy(words + i, static_cast<const Word*>(from) + i, sizeof(Word));
    }
  }
  return as<To>(words);
}

/// The nearest BF16 number, ties to even; subnormal numbers become zeros.
inline uint16_t nearest_bf16(uint32_t bits) {
  const uint32_t exponent = bits & 0x7f800000;
  if (exponent == 0) {
    return static_cast<uint16_t>(bits >> 16 & 0x8000);
  }
  if (exponent == 0x7f800000 && (bits & 0x7fffff) != 0) {
    return static_cast<uint16_t>(bits >> 16 | 0x40);
  }
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// The numbers of `high` after those of `low`.
inline __m512i to_bf16(__m512 high, __m512 low) {
  const auto upper = as<Lanes<uint32_t>>(high);
  const auto lower = as<Lanes<uint32_t>>(low);
  Lanes<uint16_t> numbers;
  for (int i = 0; i < 16; ++i) {
    numbers.at[i] = nearest_bf16(lower.at[i]);
    numbers.at[16 + i] = nearest_bf16(upper.at[i]);
  }
  return as<__m512i>(numbers);
}

template <typename Combine>
int32_t reduced(__m512i a, const Combine& combine) {
  const auto lanes = as<Lanes<int32_t>>(a);
  int32_t result = lanes.at[0];
  for (int i = 1; i < 16; ++i) {
    result = combine(result, lanes.at[i]);
  }
  return result;
}

inline __mmask16 greater_unsigned(__m512i a, __m512i b) {
  const auto x = as<Lanes<uint32_t>>(a);
  const auto y = as<Lanes<uint32_t>>(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) {
    mask |= static_cast<unsigned>(x.at[i] > y.at[i]) << i;
  }
  return static_cast<__mmask16>(mask);
}

/// Pairs of BF16 numbers: sum + the products of high halves, + those of low ones.
inline __m512 dot_bf16(__m512 sum, __m512i a, __m512i b) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000U));
  const auto upper = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_and_si512(x, high)); };
  const auto lower = [&](__m512i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); };
  return _mm512_fmadd_ps(lower(a), lower(b), _mm512_fmadd_ps(upper(a), upper(b), sum));
}

/// c + a * b in the lanes of the mask, c in the others.
inline __m512 masked_fma(__m512 a, __m512 b, __m512 c, __mmask16 mask) {
  return _mm512_mask_mov_ps(c, mask, _mm512_fmadd_ps(a, b, c));
}

}  // namespace
}  // namespace nibble::cpu::portable

#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) nibble::cpu::portable::multiply_pairs(a, b)
#define _mm512_srai_epi32(a, bits) nibble::cpu::portable::shifted_signed(a, bits)
#define _mm512_cvtepu16_epi32(a) nibble::cpu::portable::wider_words(a)
#define _mm512_cvtepu8_epi16(a) nibble::cpu::portable::bytes_as_halves(a)
#define _mm512_cvtepu8_epi32(a) nibble::cpu::portable::wider_bytes(a)
#define _mm512_cvtepi8_epi32(a) nibble::cpu::portable::wider_signed_bytes(a)
#define _mm512_cvtepu8_epi64(a) nibble::cpu::portable::bytes_as_words(a)
#define _mm512_cvtepi32_ps(a) nibble::cpu::portable::to_floats(a)
#define _mm512_cvtps_epi32(a) nibble::cpu::portable::to_integers(a)
#define _mm512_cvtph_ps(a) nibble::cpu::portable::halves_to_floats(a)
#define _mm512_cvtepi32_epi16(a) nibble::cpu::portable::narrowed<uint16_t, __m256i>(a)
#define _mm512_cvtepi32_epi8(a) nibble::cpu::portable::narrowed<uint8_t, __m128i>(a)
#define _mm512_dpbf16_ps(sum, a, b) nibble::cpu::portable::dot_bf16(sum, a, b)
#define _mm512_cvtne2ps_pbh(high, low) nibble::cpu::portable::to_bf16(high, low)
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(a, half) \
  _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), half))
#define _mm512_stream_ps(to, a) _mm512_storeu_ps(to, a)
#define _mm512_stream_si512(to, a) _mm512_storeu_si512(to, a)
#define _mm512_maskz_loadu_epi32(mask, from) \
  nibble::cpu::portable::masked_load<__m512i, uint32_t>(mask, from)
#define _mm512_maskz_loadu_epi16(mask, from) \
  nibble::cpu::portable::masked_load<__m512i, uint16_t>(mask, from)
#define _mm_maskz_loadu_epi8(mask, from) \
  nibble::cpu::portable::masked_load<__m128i, uint8_t>(mask, from)
#define _mm512_mask3_fmadd_ps(a, b, c, mask) nibble::cpu::portable::masked_fma(a, b, c, mask)
#define _mm512_cmpgt_epu32_mask(a, b) nibble::cpu::portable::greater_unsigned(a, b)
#define _mm512_reduce_add_epi32(a) \
  nibble::cpu::portable::reduced(a, [](int32_t x, int32_t y) { return x + y; })
#define _mm512_reduce_max_epi32(a) \
  nibble::cpu::portable::reduced(a, [](int32_t x, int32_t y) { return x > y ? x : y; })
#undef _mm512_castsi512_ps  // with commas of templates in it
#define _mm512_castsi512_ps(...) simde_mm512_castsi512_ps(__VA_ARGS__)
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4(a, b, which) simde_mm512_shuffle_f32x4(a, b, which)
// NOLINTEND(bugprone-reserved-identifier)
