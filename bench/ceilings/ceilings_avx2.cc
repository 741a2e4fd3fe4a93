#include <immintrin.h>

#include "bench/ceilings/ceiling_loops.h"
#include "bench/ceilings/register_loop.h"

namespace nibble::cpu {

void fma256_loop(int64_t turns) {
  register_loop(_mm256_set1_ps(1.25F), _mm256_set1_ps(-0.75F), turns,
                [](auto sum, auto a, auto b) { return _mm256_fmadd_ps(a, b, sum); });
}

}  // namespace nibble::cpu
