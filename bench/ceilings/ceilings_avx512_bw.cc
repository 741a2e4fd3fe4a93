#include <immintrin.h>

#include "bench/ceilings/ceiling_loops.h"
#include "bench/ceilings/register_loop.h"

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
  register_loop(_mm512_set1_ps(1.25F), _mm512_set1_ps(-0.75F), turns,
                [](auto sum, auto a, auto b) { return _mm512_fmadd_ps(a, b, sum); });
}

}  // namespace nibble::cpu
