#include "backend/cpu/simd/simd_avx512.h"
// The vocabulary comes first.
#include "backend/cpu/kernels/table.h"

namespace nibble::cpu {

const KernelTable kAvx512BwKernels = kernels_named("avx512_bw");

}  // namespace nibble::cpu
