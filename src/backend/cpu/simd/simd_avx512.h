#pragma once

#include <cstdint>

#include <immintrin.h>

// The vector vocabulary in AVX-512 (F, BW, VL, DQ; VNNI when the compiler may use it): one register
// per vector, results bit for bit those of simd_scalar.h. Included by one source file per flags.
namespace nibble::cpu {
namespace {

struct F32x16 {
  __m512 v;
};
struct I32x16 {
  __m512i v;
};

struct Simd {
  // How far ahead of the loads weights are fetched into the first and second level: a core needs
  // some 60 lines on their way to use its share of memory bandwidth, of which the first level holds
  // 16. Measured with `nibble bench kernels --m 1` (1 KiB alone: a fifth slower).
  static constexpr int64_t kNearBytes = 4096;
  static constexpr int64_t kFarBytes = 16384;
  static constexpr bool kFewRegisters = false;
  static constexpr int kShortRows = 0;
  static constexpr int32_t kInt8Offset = 128;  // of INT8 activations for INT8 weights
  static constexpr int kPairRows = 12;  // rows of integer products that two weight tiles share
  static constexpr int kFixedRows = 8;
  static constexpr int kRows = 8;  // 32 registers: eight rows of two accumulators and a total

  static F32x16 set(float x) { return {_mm512_set1_ps(x)}; }
  static F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static void store(float* p, F32x16 a) { _mm512_storeu_ps(p, a.v); }
  static F32x16 add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
  static F32x16 sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
  static F32x16 mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
  static F32x16 div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
  static F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
  static F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
  static F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
  static F32x16 select_less(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
  }
  static __m256 upper(__m512 a) { return _mm512_extractf32x8_ps(a, 1); }
  static float reduce_add(F32x16 a) {
    const __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), upper(a.v));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  static float reduce_max(F32x16 a) {
    const __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a.v), upper(a.v));
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static float reduce_min(F32x16 a) {
    const __m256 x = _mm256_min_ps(_mm512_castps512_ps256(a.v), upper(a.v));
    __m128 y = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_min_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_min_ss(y, _mm_movehdup_ps(y)));
  }

  static I32x16 set_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
  static I32x16 load_int(const void* p) { return {_mm512_loadu_si512(p)}; }
  /// The first `count` (1 to 15) lanes; the others are 0.
  static I32x16 load_words(const void* p, int64_t count) {
    return {_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1U << count) - 1), p)};
  }
  static void store_int(void* p, I32x16 a) { _mm512_storeu_si512(p, a.v); }
  static I32x16 add_int(I32x16 a, I32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
  static I32x16 sub_int(I32x16 a, I32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
  static I32x16 and_int(I32x16 a, I32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
  static I32x16 or_int(I32x16 a, I32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
  static I32x16 xor_int(I32x16 a, I32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
  static I32x16 max_int(I32x16 a, I32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
  /// Of the halves of each lane, as unsigned numbers.
  static I32x16 max_u16(I32x16 a, I32x16 b) { return {_mm512_max_epu16(a.v, b.v)}; }
  template <int kBits>
  static I32x16 shift_left(I32x16 a) {
    return {_mm512_slli_epi32(a.v, kBits)};
  }
  template <int kBits>
  static I32x16 shift_right(I32x16 a) {
    return {_mm512_srli_epi32(a.v, kBits)};
  }
  template <int kBits>
  static I32x16 shift_right_signed(I32x16 a) {
    return {_mm512_srai_epi32(a.v, kBits)};
  }
  static int32_t reduce_add_int(I32x16 a) { return _mm512_reduce_add_epi32(a.v); }
  static int32_t reduce_max_int(I32x16 a) { return _mm512_reduce_max_epi32(a.v); }

  /// Lane j of row i becomes lane i of row j: pairs, quartets, then blocks of four lanes change
  /// places.
  static F32x16 evens(F32x16 a, F32x16 b) {
    const __m512i lanes =
        _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return {_mm512_permutex2var_ps(a.v, lanes, b.v)};
  }
  static F32x16 odds(F32x16 a, F32x16 b) {
    const __m512i lanes =
        _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    return {_mm512_permutex2var_ps(a.v, lanes, b.v)};
  }
  static void transpose(F32x16 (&rows)[16]) {
    __m512 pair[16];
    for (int i = 0; i < 16; i += 2) {
      pair[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
      pair[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    __m512 quartet[16];  // [4 i + j]: column j of rows 4i .. 4i+3, for each block of four columns
    for (int i = 0; i < 16; i += 4) {
      quartet[i] = _mm512_shuffle_ps(pair[i], pair[i + 2], 0x44);
      quartet[i + 1] = _mm512_shuffle_ps(pair[i], pair[i + 2], 0xee);
      quartet[i + 2] = _mm512_shuffle_ps(pair[i + 1], pair[i + 3], 0x44);
      quartet[i + 3] = _mm512_shuffle_ps(pair[i + 1], pair[i + 3], 0xee);
    }
    for (int j = 0; j < 4; ++j) {
      const __m512 even_upper = _mm512_shuffle_f32x4(quartet[j], quartet[4 + j], 0x88);
      const __m512 odd_upper = _mm512_shuffle_f32x4(quartet[j], quartet[4 + j], 0xdd);
      const __m512 even_lower = _mm512_shuffle_f32x4(quartet[8 + j], quartet[12 + j], 0x88);
      const __m512 odd_lower = _mm512_shuffle_f32x4(quartet[8 + j], quartet[12 + j], 0xdd);
      rows[j].v = _mm512_shuffle_f32x4(even_upper, even_lower, 0x88);
      rows[8 + j].v = _mm512_shuffle_f32x4(even_upper, even_lower, 0xdd);
      rows[4 + j].v = _mm512_shuffle_f32x4(odd_upper, odd_lower, 0x88);
      rows[12 + j].v = _mm512_shuffle_f32x4(odd_upper, odd_lower, 0xdd);
    }
  }

  /// (a & b) | c of each lane's bits.
  static F32x16 and_or(I32x16 a, F32x16 b, F32x16 c) {
    return from_bits({_mm512_ternarylogic_epi32(a.v, bits(b).v, bits(c).v, 0xea)});
  }
  /// The larger bits, as unsigned numbers: above all others for NaN.
  static F32x16 max_bits(F32x16 a, F32x16 b) {
    return {
        _mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
  }
  /// Whether any lane's bits exceed those of a positive `limit`.
  static bool any_bits_above(F32x16 a, float limit) {
    const __m512i top = _mm512_castps_si512(_mm512_set1_ps(limit));
    return _mm512_cmpgt_epu32_mask(_mm512_castps_si512(a.v), top) != 0;
  }
  static I32x16 bits(F32x16 a) { return {_mm512_castps_si512(a.v)}; }
  static F32x16 from_bits(I32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
  static F32x16 to_float(I32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
  static I32x16 to_int(F32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }

  static __m128i quarter(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static __m256i half(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static I32x16 load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(quarter(p))}; }
  static I32x16 load_s8(const uint8_t* p) { return {_mm512_cvtepi8_epi32(quarter(p))}; }
  static I32x16 load_u16(const uint8_t* p) { return {_mm512_cvtepu16_epi32(half(p))}; }
  static F32x16 load_f16(const uint8_t* p) { return {_mm512_cvtph_ps(half(p))}; }
  /// Each byte goes to a pair of lanes: as it is, and shifted so that its high nibble is low.
  static I32x16 load_u4(const uint8_t* p) {
    const __m512i wide = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m512i both = _mm512_or_si512(wide, _mm512_slli_epi64(wide, 28));
    return {_mm512_and_si512(both, _mm512_set1_epi32(15))};
  }
  static I32x16 steps_s16(I32x16 codes, I32x16 step, I32x16 start) {
    const __m512i sums = _mm512_add_epi16(_mm512_mullo_epi16(codes.v, step.v), start.v);
    return {_mm512_srai_epi16(sums, 8)};
  }
  static I32x16 mul_u16(I32x16 a, I32x16 b) { return {_mm512_mullo_epi16(a.v, b.v)}; }
  static I32x16 upper_nibbles(I32x16 words) { return {_mm512_srli_epi16(words.v, 12)}; }
  using CodeTable = F32x16;
  static CodeTable code_table(F32x16 numbers) { return numbers; }
  static void look_up_u4(const uint8_t* p, const CodeTable& table, float* out) {
    _mm512_storeu_ps(out, _mm512_permutexvar_ps(load_u4(p).v, table.v));
    _mm512_storeu_ps(out + 16, _mm512_permutexvar_ps(load_u4(p + 8).v, table.v));
  }
  static F32x16 load_fp8(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(quarter(p));  // the sign is copied upwards
    const __m256i bits = _mm256_slli_epi16(wide, 7);
    return {
        _mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))))};
  }
  static void store_s16(uint8_t* p, I32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
  }
  static void store_u8(uint8_t* p, I32x16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
  }
  /// Four times 16 lanes in -128 .. 127 as bytes, each plus `offset`.
  static void store_bytes(uint8_t* p, const I32x16 (&a)[4], uint8_t offset) {
    const __m512i low = _mm512_packs_epi32(a[0].v, a[1].v);
    const __m512i high = _mm512_packs_epi32(a[2].v, a[3].v);
    // Four bytes of each of the four in every 128 bits.
    const __m512i bytes = _mm512_packs_epi16(low, high);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i ordered = _mm512_permutexvar_epi32(order, bytes);
    _mm512_storeu_si512(p, _mm512_add_epi8(ordered, _mm512_set1_epi8(static_cast<char>(offset))));
  }
  static __m256i to_bf16(F32x16 a) {
#if defined(__AVX512BF16__)
    constexpr int kSubnormal = 0x20;  // the instruction takes such numbers for zeros
    if (__builtin_expect(_mm512_fpclass_ps_mask(a.v, kSubnormal) == 0, 1) != 0) {
      return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
    }
#endif
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(sum, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
  }
  static void store_bf16(uint8_t* p, F32x16 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_bf16(a));
  }
  /// A permutation reads only four bits of each index, so no mask is needed.
  template <int kIndex>
  static F32x16 nibble(I32x16 word) {
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm512_permutexvar_ps(shift_right<4 * kIndex>(word).v, values)};
  }
  /// E2M1 at nibble kIndex of each lane.
  template <int kIndex>
  static F32x16 fp4(I32x16 word) {
    const __m512 values = _mm512_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F, -0.0F,
                                         -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F);
    return {_mm512_permutexvar_ps(shift_right<4 * kIndex>(word).v, values)};
  }
  /// The same, but the compiler does not know how it came about. GCC would add products to each
  /// other before it adds them to sums, or copy sums, and run out of registers.
  static __m512i opaque(__m512i x) {
#ifndef NIBBLE_PORTABLE_AVX512  // whose vectors are no registers
    __asm__("" : "+v"(x));
#endif
    return x;
  }
  static I32x16 in_register(I32x16 a) { return {opaque(a.v)}; }
#if defined(__AVX512VNNI__) || defined(NIBBLE_PORTABLE_AVX512)
  static I32x16 dot_int8(I32x16 acc, I32x16 u, I32x16 s) {
    return {opaque(_mm512_dpbusd_epi32(acc.v, u.v, s.v))};
  }
  static I32x16 dot_u4s8(I32x16 acc, I32x16 u, I32x16 s) { return dot_int8(acc, u, s); }
  static I32x16 dot_s16(I32x16 acc, I32x16 a, I32x16 b) {
    return {opaque(_mm512_dpwssd_epi32(acc.v, a.v, b.v))};
  }
#else
  /// Even and odd bytes apart in 16 bits, where no product of pairs can saturate.
  static I32x16 dot_int8(I32x16 acc, I32x16 u, I32x16 s) {
    const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u.v, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(s.v, 8), 8));
    const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u.v, 8), _mm512_srai_epi16(s.v, 8));
    return {opaque(_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd)))};
  }
  /// 2 * 15 * 128 fits 16 bits.
  static I32x16 dot_u4s8(I32x16 acc, I32x16 u, I32x16 s) {
    const __m512i pairs = _mm512_maddubs_epi16(u.v, s.v);
    return {opaque(_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))))};
  }
  static I32x16 dot_s16(I32x16 acc, I32x16 a, I32x16 b) {
    return {opaque(_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, b.v)))};
  }
#endif
};

}  // namespace
}  // namespace nibble::cpu
