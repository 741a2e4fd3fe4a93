#pragma once

#include <cstdint>

#include <immintrin.h>

// The vector vocabulary in AVX2, FMA and F16C: two registers per vector, results bit for bit
// those of simd_scalar.h. Included by one source file.
namespace nibble::cpu {
namespace {

struct F32x16 {
  __m256 lo;
  __m256 hi;
};
struct I32x16 {
  __m256i lo;
  __m256i hi;
};

struct Simd {
  // How far ahead of the loads weights are fetched; Zen 3 does the rest itself. Measured there with
  // one thread over 512 MB: 4 and 16 KiB as for AVX-512 read bf16 a fifth slower, int8 a tenth.
  static constexpr int64_t kNearBytes = 2048;
  static constexpr int64_t kFarBytes = 0;
  static constexpr int kPairRows = 0;
#if defined(__AVXVNNI__)
  static constexpr int32_t kInt8Offset = 128;  // of INT8 activations for INT8 weights
  static constexpr int kShortRows = 0;
#else
  static constexpr int32_t kInt8Offset = 0;
  static constexpr int kShortRows = 4;  // of int4 products that are summed in 16 bits first
#endif
  static constexpr bool kFewRegisters = true;  // gcc else spills sums in the loop over a block
  static constexpr int kRows = 2;  // 16 registers: two rows of two accumulators fill half
  static constexpr int kFixedRows = 4;

  static F32x16 set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static F32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F32x16 a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
  }
  static F32x16 add(F32x16 a, F32x16 b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
  }
  static F32x16 sub(F32x16 a, F32x16 b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
  }
  static F32x16 mul(F32x16 a, F32x16 b) {
    return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
  }
  static F32x16 div(F32x16 a, F32x16 b) {
    return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
  }
  static F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  }
  static F32x16 min(F32x16 a, F32x16 b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
  }
  static F32x16 max(F32x16 a, F32x16 b) {
    return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)};
  }
  static F32x16 select_less(F32x16 a, F32x16 b, F32x16 yes, F32x16 no) {
    return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
  }
  static float reduce_add(F32x16 a) {
    const __m256 x = _mm256_add_ps(a.lo, a.hi);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
  }
  static float reduce_max(F32x16 a) {
    const __m256 x = _mm256_max_ps(a.lo, a.hi);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
  }
  static float reduce_min(F32x16 a) {
    const __m256 x = _mm256_min_ps(a.lo, a.hi);
    __m128 y = _mm_min_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_min_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_min_ss(y, _mm_movehdup_ps(y)));
  }

  static I32x16 set_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static I32x16 load_int(const void* p) {
    const auto* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
  }
  /// The first `count` (1 to 15) lanes; the others are 0.
  static I32x16 load_words(const void* p, int64_t count) {
    const auto* q = static_cast<const int*>(p);
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i lo = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lanes);
    const __m256i hi = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count - 8)), lanes);
    return {_mm256_maskload_epi32(q, lo), _mm256_maskload_epi32(q + 8, hi)};
  }
  static void store_int(void* p, I32x16 a) {
    auto* q = static_cast<__m256i*>(p);
    _mm256_storeu_si256(q, a.lo);
    _mm256_storeu_si256(q + 1, a.hi);
  }
  static I32x16 add_int(I32x16 a, I32x16 b) {
    return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
  }
  static I32x16 sub_int(I32x16 a, I32x16 b) {
    return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
  }
  static I32x16 and_int(I32x16 a, I32x16 b) {
    return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
  }
  static I32x16 or_int(I32x16 a, I32x16 b) {
    return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)};
  }
  static I32x16 xor_int(I32x16 a, I32x16 b) {
    return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
  }
  static I32x16 max_int(I32x16 a, I32x16 b) {
    return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)};
  }
  /// Of the halves of each lane, as unsigned numbers.
  static I32x16 max_u16(I32x16 a, I32x16 b) {
    return {_mm256_max_epu16(a.lo, b.lo), _mm256_max_epu16(a.hi, b.hi)};
  }
  template <int kBits>
  static I32x16 shift_left(I32x16 a) {
    return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
  }
  template <int kBits>
  static I32x16 shift_right(I32x16 a) {
    return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
  }
  template <int kBits>
  static I32x16 shift_right_signed(I32x16 a) {
    return {_mm256_srai_epi32(a.lo, kBits), _mm256_srai_epi32(a.hi, kBits)};
  }
  static int32_t reduce_add_int(I32x16 a) {
    const __m256i x = _mm256_add_epi32(a.lo, a.hi);
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
  }
  static int32_t reduce_max_int(I32x16 a) {
    const __m256i x = _mm256_max_epi32(a.lo, a.hi);
    __m128i y = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_max_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
  }

  /// Lanes 0, 2, ... of a, then of b.
  static F32x16 evens(F32x16 a, F32x16 b) { return {select<0x88>(a), select<0x88>(b)}; }
  /// Lanes 1, 3, ... of a, then of b.
  static F32x16 odds(F32x16 a, F32x16 b) { return {select<0xdd>(a), select<0xdd>(b)}; }
  template <int kLanes>
  static __m256 select(F32x16 a) {
    const __m256d quarters = _mm256_castps_pd(_mm256_shuffle_ps(a.lo, a.hi, kLanes));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(quarters, 0xd8));
  }

  /// Lane j of row i becomes lane i of row j: pairs, quartets and halves change places.
  static void transpose(__m256 (&r)[8]) {
    __m256 pair[8];
    for (int i = 0; i < 8; i += 2) {
      pair[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      pair[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    __m256 quartet[8];
    for (int i = 0; i < 8; i += 4) {
      for (int j = 0; j < 2; ++j) {
        const __m256 a = pair[i + j];
        const __m256 b = pair[i + j + 2];
        quartet[i + 2 * j] = _mm256_shuffle_ps(a, b, 0x44);
        quartet[i + 2 * j + 1] = _mm256_shuffle_ps(a, b, 0xee);
      }
    }
    for (int i = 0; i < 4; ++i) {
      r[i] = _mm256_permute2f128_ps(quartet[i], quartet[i + 4], 0x20);
      r[i + 4] = _mm256_permute2f128_ps(quartet[i], quartet[i + 4], 0x31);
    }
  }
  static void transpose(F32x16 (&rows)[16]) {
    __m256 quarter[4][8];  // upper left, lower left, upper right, lower right
    for (int i = 0; i < 8; ++i) {
      quarter[0][i] = rows[i].lo;
      quarter[1][i] = rows[i + 8].lo;
      quarter[2][i] = rows[i].hi;
      quarter[3][i] = rows[i + 8].hi;
    }
    for (auto& q : quarter) {
      transpose(q);
    }
    for (int i = 0; i < 8; ++i) {
      rows[i] = {quarter[0][i], quarter[1][i]};
      rows[i + 8] = {quarter[2][i], quarter[3][i]};
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
    return from_bits({_mm256_max_epu32(x.lo, y.lo), _mm256_max_epu32(x.hi, y.hi)});
  }
  /// Whether any lane's bits exceed those of a positive `limit`.
  static bool any_bits_above(F32x16 a, float limit) {
    const I32x16 top = bits(set(limit));
    const I32x16 largest = bits(max_bits(a, set(limit)));
    const __m256i same = _mm256_and_si256(_mm256_cmpeq_epi32(largest.lo, top.lo),
                                          _mm256_cmpeq_epi32(largest.hi, top.hi));
    return _mm256_movemask_epi8(same) != -1;
  }
  static I32x16 bits(F32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
  static F32x16 from_bits(I32x16 a) {
    return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)};
  }
  static F32x16 to_float(I32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
  static I32x16 to_int(F32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }

  static __m128i half(const uint8_t* p) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  }
  static I32x16 load_u8(const uint8_t* p) {
    const __m128i b = half(p);
    return {_mm256_cvtepu8_epi32(b), _mm256_cvtepu8_epi32(_mm_srli_si128(b, 8))};
  }
  static I32x16 load_s8(const uint8_t* p) {
    // Two loads cost less than one and a shift.
    return {_mm256_cvtepi8_epi32(_mm_loadu_si64(p)), _mm256_cvtepi8_epi32(_mm_loadu_si64(p + 8))};
  }
  static I32x16 load_u16(const uint8_t* p) {
    return {_mm256_cvtepu16_epi32(half(p)), _mm256_cvtepu16_epi32(half(p + 16))};
  }
  static F32x16 load_f16(const uint8_t* p) {
    return {_mm256_cvtph_ps(half(p)), _mm256_cvtph_ps(half(p + 16))};
  }
  static __m128i nibbles(const uint8_t* p) {
    const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m128i mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(b, mask);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(b, 4), mask);
    return _mm_unpacklo_epi8(low, high);
  }
  static I32x16 load_u4(const uint8_t* p) {
    const __m128i codes = nibbles(p);
    return {_mm256_cvtepu8_epi32(codes), _mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8))};
  }
  static __m256i steps_s16(__m256i codes, __m256i step, __m256i start) {
    return _mm256_srai_epi16(_mm256_add_epi16(_mm256_mullo_epi16(codes, step), start), 8);
  }
  static I32x16 steps_s16(I32x16 codes, I32x16 step, I32x16 start) {
    return {steps_s16(codes.lo, step.lo, start.lo), steps_s16(codes.hi, step.hi, start.hi)};
  }
  static I32x16 mul_u16(I32x16 a, I32x16 b) {
    return {_mm256_mullo_epi16(a.lo, b.lo), _mm256_mullo_epi16(a.hi, b.hi)};
  }
  static I32x16 upper_nibbles(I32x16 words) {
    return {_mm256_srli_epi16(words.lo, 12), _mm256_srli_epi16(words.hi, 12)};
  }
  /// The lower and the upper bytes of 16 BF16 numbers, twice.
  struct CodeTable {
    __m256i low;
    __m256i high;
  };
  static CodeTable code_table(F32x16 numbers) {
    // Of four numbers: their third bytes, then their fourth.
    const __m256i bytes = _mm256_set1_epi64x(0x0f0b07030e0a0602);
    const __m256i first = _mm256_shuffle_epi8(_mm256_castps_si256(numbers.lo), bytes);
    const __m256i last = _mm256_shuffle_epi8(_mm256_castps_si256(numbers.hi), bytes);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i both = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi32(first, last), order);
    return {_mm256_permute4x64_epi64(both, 0x44), _mm256_permute4x64_epi64(both, 0xee)};
  }
  static void look_up_u4(const uint8_t* p, const CodeTable& table, float* out) {
    // Pairs of bytes, four nibbles each: those at even places to the lower half.
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_shuffle_epi8(packed, order));
    const __m256i both = _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
    const __m256i codes = _mm256_and_si256(both, _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(table.low, codes);
    const __m256i high = _mm256_shuffle_epi8(table.high, codes);
    const __m256i zero = _mm256_setzero_si256();
    const auto store = [&](float* to, __m256i numbers) {
      _mm256_storeu_ps(to, _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, numbers)));
      _mm256_storeu_ps(to + 8, _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, numbers)));
    };
    store(out, _mm256_unpacklo_epi8(low, high));
    store(out + 16, _mm256_unpackhi_epi8(low, high));
  }
  static F32x16 load_fp8(const uint8_t* p) {
    const __m256i wide = _mm256_cvtepi8_epi16(half(p));  // the sign is copied upwards
    const __m256i bits = _mm256_slli_epi16(wide, 7);
    const __m256i kept = _mm256_and_si256(bits, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(kept)),
            _mm256_cvtph_ps(_mm256_extracti128_si256(kept, 1))};
  }
  static void store_s16(uint8_t* p, I32x16 a) {
    const __m256i halves = _mm256_packs_epi32(a.lo, a.hi);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(halves, 0xd8));
  }
  static void store_u8(uint8_t* p, I32x16 a) {
    const __m256i byte = _mm256_set1_epi32(0xff);
    const __m256i halves =
        _mm256_packus_epi32(_mm256_and_si256(a.lo, byte), _mm256_and_si256(a.hi, byte));
    const __m256i bytes =
        _mm256_packus_epi16(_mm256_permute4x64_epi64(halves, 0xd8), _mm256_setzero_si256());
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 0xd8)));
  }
  static __m256i bf16_bits(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(sum, quiet, nan), 16);
  }
  /// Four times 16 lanes in -128 .. 127 as bytes, each plus `offset`.
  static void store_bytes(uint8_t* p, const I32x16 (&a)[4], uint8_t offset) {
    for (int i = 0; i < 4; ++i) {
      store_u8(p + 16 * i, add_int(a[i], set_int(offset)));
    }
  }
  static void store_bf16(uint8_t* p, F32x16 a) {
    const __m256i halves = _mm256_packus_epi32(bf16_bits(a.lo), bf16_bits(a.hi));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(halves, 0xd8));
  }
  /// A code set into the mantissa of a power of two whose last place counts 1 there makes their
  /// sum, from which power and offset are taken exactly: no conversion, and the upper four nibbles
  /// need no shifts of their own.
  template <int kIndex>
  static F32x16 nibble(I32x16 word) {
    constexpr int kBit = kIndex / 4 * 16;
    constexpr auto kPower = static_cast<float>(1 << (23 - kBit));
    const I32x16 code = and_int(shift_right<kIndex % 4 * 4>(word), set_int(15 << kBit));
    return sub(from_bits(or_int(code, bits(set(kPower)))), set(kPower + 8.0F));
  }
  /// E2M1 at nibble kIndex of each lane.
  template <int kIndex>
  static F32x16 fp4(I32x16 word) {
    const __m256 magnitudes = _mm256_setr_ps(0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F);
    const I32x16 code = shift_right<4 * kIndex>(word);  // permutes look at three bits
    const I32x16 sign = and_int(shift_left<28>(code), set_int(static_cast<int>(0x80000000U)));
    const F32x16 values{_mm256_permutevar8x32_ps(magnitudes, code.lo),
                        _mm256_permutevar8x32_ps(magnitudes, code.hi)};
    return from_bits(or_int(bits(values), sign));
  }
  /// The same, but the compiler does not know how it came about. GCC would add products to each
  /// other before it adds them to sums, or copy sums, and run out of registers.
  static __m256i opaque(__m256i x) {
    __asm__("" : "+x"(x));
    return x;
  }
  static I32x16 in_register(I32x16 a) { return {opaque(a.lo), opaque(a.hi)}; }
#if defined(__AVXVNNI__)
  static __m256i dot_u8s8(__m256i acc, __m256i u, __m256i s) {
    return opaque(_mm256_dpbusd_avx_epi32(acc, u, s));
  }
  /// acc + the products of four offset activations with four weights.
  static I32x16 dot_int8(I32x16 acc, I32x16 x, I32x16 w) {
    return {dot_u8s8(acc.lo, x.lo, w.lo), dot_u8s8(acc.hi, x.hi, w.hi)};
  }
  static __m256i dot_u4s8(__m256i acc, __m256i u, __m256i s) { return dot_u8s8(acc, u, s); }
#else
  /// Two products of |w| with 127 fit 16 bits.
  static __m256i dot_s8s8(__m256i acc, __m256i x, __m256i w) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return opaque(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
  }
  /// acc + the products of four activations, -127 .. 127, with four weights.
  static I32x16 dot_int8(I32x16 acc, I32x16 x, I32x16 w) {
    return {dot_s8s8(acc.lo, x.lo, w.lo), dot_s8s8(acc.hi, x.hi, w.hi)};
  }
  /// 2 * 15 * 128 fits 16 bits.
  static __m256i dot_u4s8(__m256i acc, __m256i u, __m256i s) {
    const __m256i pairs = _mm256_maddubs_epi16(u, s);
    return opaque(_mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
  }
  /// Each lane's 16-bit sums plus the products of its pairs of bytes, u's at most 15.
  static I32x16 add_short(I32x16 sums, I32x16 u, I32x16 s) {
    return {opaque(_mm256_add_epi16(sums.lo, _mm256_maddubs_epi16(u.lo, s.lo))),
            opaque(_mm256_add_epi16(sums.hi, _mm256_maddubs_epi16(u.hi, s.hi)))};
  }
  /// The sum of each lane's two 16-bit numbers.
  static I32x16 widen_short(I32x16 a) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(a.lo, ones), _mm256_madd_epi16(a.hi, ones)};
  }
#endif
  static __m256i dot_s16(__m256i acc, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
    return opaque(_mm256_dpwssd_avx_epi32(acc, a, b));
#else
    return opaque(_mm256_add_epi32(acc, _mm256_madd_epi16(a, b)));
#endif
  }
  static I32x16 dot_s16(I32x16 acc, I32x16 a, I32x16 b) {
    return {dot_s16(acc.lo, a.lo, b.lo), dot_s16(acc.hi, a.hi, b.hi)};
  }
  static I32x16 dot_u4s8(I32x16 acc, I32x16 u, I32x16 s) {
    return {dot_u4s8(acc.lo, u.lo, s.lo), dot_u4s8(acc.hi, u.hi, s.hi)};
  }
};

}  // namespace
}  // namespace nibble::cpu
