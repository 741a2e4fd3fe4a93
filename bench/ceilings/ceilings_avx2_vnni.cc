#include <immintrin.h>

#include "bench/ceilings/ceiling_loops.h"
#include "bench/ceilings/register_loop.h"

namespace nibble::cpu {

void vnni256_loop(int64_t turns) {
  register_loop(_mm256_set1_epi32(0x5a3c9617), _mm256_set1_epi32(0x17e4c25b), turns,
                [](auto sum, auto a, auto b) { return _mm256_dpbusd_avx_epi32(sum, a, b); });
}

}  // namespace nibble::cpu
