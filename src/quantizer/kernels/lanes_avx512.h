#pragma once

#include "backend/cpu/simd/simd_avx512.h"

// lanes_scalar.h in AVX-512. Included by one source file.
namespace nibble::rows {
namespace {

struct Lanes : cpu::Simd {
  static cpu::I32x16 count_greater(cpu::I32x16 count, cpu::F32x16 a, cpu::F32x16 b) {
    const __mmask16 mask = _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ);
    return {_mm512_mask_add_epi32(count.v, mask, count.v, _mm512_set1_epi32(1))};
  }
  static cpu::I32x16 count_lost(cpu::I32x16 count, cpu::F32x16 x, cpu::F32x16 decoded) {
    const __m512 zero = _mm512_setzero_ps();
    const __mmask16 kept = _mm512_cmp_ps_mask(x.v, zero, _CMP_NEQ_OQ);
    const __mmask16 mask = _mm512_mask_cmp_ps_mask(kept, decoded.v, zero, _CMP_EQ_OQ);
    return {_mm512_mask_add_epi32(count.v, mask, count.v, _mm512_set1_epi32(1))};
  }
  static void store_nibbles(uint8_t* p, cpu::I32x16 codes) {
    const __m512i low = _mm512_and_si512(codes.v, _mm512_set1_epi32(15));
    const __m512i pairs = _mm512_or_si512(low, _mm512_srli_epi64(low, 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm512_cvtepi64_epi8(pairs));
  }
  static void store_bytes(uint8_t* p, cpu::I32x16 codes) { store_u8(p, codes); }
  static void store_halves(uint8_t* p, cpu::I32x16 codes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(codes.v));
  }
};

}  // namespace
}  // namespace nibble::rows
