#include <immintrin.h>

#include "backend/cpu/ceiling_loops.h"

namespace nibble::cpu {

uint64_t read_loop_avx512(const std::byte* data, int64_t bytes) {
  __m512i sums[8] = {};
  for (const std::byte* end = data + bytes; data < end; data += kReadStep) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(data) + kReadAhead + 64 * i, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(data) + kReadFarAhead + 64 * i, _MM_HINT_T1);
      sums[i] = _mm512_add_epi64(sums[i], _mm512_load_si512(data + 64 * i));
    }
  }
  __m512i sum = sums[0];
  for (int i = 1; i < 8; ++i) {
    sum = _mm512_add_epi64(sum, sums[i]);
  }
  uint64_t lanes[8];
  _mm512_storeu_si512(lanes, sum);
  uint64_t total = 0;
  for (const uint64_t lane : lanes) {
    total += lane;
  }
  return total;
}

void fma512_loop(int64_t turns) {
  __m512 sums[12] = {};
  for (__m512& sum : sums) {
    __asm__ volatile("" : "+v"(sum));  // else equal sums become one
  }
  __m512 x = _mm512_set1_ps(1.25F);
  __m512 y = _mm512_set1_ps(-0.75F);
  for (int64_t turn = 0; turn < turns; ++turn) {
    __asm__ volatile("" : "+v"(x), "+v"(y));
#pragma GCC unroll 12
    for (__m512& sum : sums) {
      sum = _mm512_fmadd_ps(x, y, sum);
    }
  }
  for (__m512& sum : sums) {
    __asm__ volatile("" : "+v"(sum));
  }
}

}  // namespace nibble::cpu
