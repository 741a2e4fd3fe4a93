#include <immintrin.h>

#include "backend/cpu/ceiling_loops.h"

namespace nibble::cpu {

void vnni512_loop(int64_t turns) {
  __m512i sums[12] = {};
  for (__m512i& sum : sums) {
    __asm__ volatile("" : "+v"(sum));  // else equal sums become one
  }
  __m512i x = _mm512_set1_epi32(0x5a3c9617);
  __m512i y = _mm512_set1_epi32(0x17e4c25b);
  for (int64_t turn = 0; turn < turns; ++turn) {
    __asm__ volatile("" : "+v"(x), "+v"(y));
#pragma GCC unroll 12
    for (__m512i& sum : sums) {
      sum = _mm512_dpbusd_epi32(sum, x, y);
    }
  }
  for (__m512i& sum : sums) {
    __asm__ volatile("" : "+v"(sum));
  }
}

}  // namespace nibble::cpu
