#include <immintrin.h>

#include "backend/cpu/ceiling_loops.h"

namespace nibble::cpu {

void vnni256_loop(int64_t turns) {
  __m256i sums[12] = {};
  for (__m256i& sum : sums) {
    __asm__ volatile("" : "+x"(sum));  // else equal sums become one
  }
  __m256i x = _mm256_set1_epi32(0x5a3c9617);
  __m256i y = _mm256_set1_epi32(0x17e4c25b);
  for (int64_t turn = 0; turn < turns; ++turn) {
    __asm__ volatile("" : "+x"(x), "+x"(y));
#pragma GCC unroll 12
    for (__m256i& sum : sums) {
      sum = _mm256_dpbusd_avx_epi32(sum, x, y);
    }
  }
  for (__m256i& sum : sums) {
    __asm__ volatile("" : "+x"(sum));
  }
}

}  // namespace nibble::cpu
