#include <immintrin.h>

#include "backend/cpu/ceiling_loops.h"

namespace nibble::cpu {

void fma256_loop(int64_t turns) {
  __m256 sums[12] = {};
  for (__m256& sum : sums) {
    __asm__ volatile("" : "+x"(sum));  // else equal sums become one
  }
  __m256 x = _mm256_set1_ps(1.25F);
  __m256 y = _mm256_set1_ps(-0.75F);
  for (int64_t turn = 0; turn < turns; ++turn) {
    __asm__ volatile("" : "+x"(x), "+x"(y));
#pragma GCC unroll 12
    for (__m256& sum : sums) {
      sum = _mm256_fmadd_ps(x, y, sum);
    }
  }
  for (__m256& sum : sums) {
    __asm__ volatile("" : "+x"(sum));
  }
}

}  // namespace nibble::cpu
