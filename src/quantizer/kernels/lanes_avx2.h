#pragma once

#include "backend/cpu/simd/simd_avx2.h"

// lanes_scalar.h in AVX2. Included by one source file.
namespace nibble::rows {
namespace {

struct Lanes : cpu::Simd {
  static __m256i count(__m256i count, __m256 mask) {
    return _mm256_sub_epi32(count, _mm256_castps_si256(mask));
  }
  static cpu::I32x16 count_greater(cpu::I32x16 n, cpu::F32x16 a, cpu::F32x16 b) {
    return {count(n.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
            count(n.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
  }
  static __m256 lost(__m256 x, __m256 decoded) {
    const __m256 zero = _mm256_setzero_ps();
    return _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_NEQ_OQ),
                         _mm256_cmp_ps(decoded, zero, _CMP_EQ_OQ));
  }
  static cpu::I32x16 count_lost(cpu::I32x16 n, cpu::F32x16 x, cpu::F32x16 decoded) {
    return {count(n.lo, lost(x.lo, decoded.lo)), count(n.hi, lost(x.hi, decoded.hi))};
  }
  /// Low bytes: packing works in halves of a register, so quartets of lanes change places.
  static __m128i bytes(cpu::I32x16 codes) {
    const __m256i mask = _mm256_set1_epi32(255);
    const __m256i words =
        _mm256_packus_epi32(_mm256_and_si256(codes.lo, mask), _mm256_and_si256(codes.hi, mask));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    return _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  }
  static void store_nibbles(uint8_t* p, cpu::I32x16 codes) {
    const __m128i low = _mm_and_si128(bytes(codes), _mm_set1_epi8(15));
    const __m128i pairs = _mm_maddubs_epi16(low, _mm_set1_epi16(0x1001));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
  }
  static void store_bytes(uint8_t* p, cpu::I32x16 codes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes(codes));
  }
  static void store_halves(uint8_t* p, cpu::I32x16 codes) {
    const __m256i mask = _mm256_set1_epi32(65535);
    const __m256i words =
        _mm256_packus_epi32(_mm256_and_si256(codes.lo, mask), _mm256_and_si256(codes.hi, mask));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xd8));
  }
};

}  // namespace
}  // namespace nibble::rows
