#include "backend/cpu/simd/simd_avx512.h"
// The vocabulary comes first.
#include "backend/cpu/kernels/table.h"

namespace nibble::cpu {

const KernelTable kAvx512Kernels = kernels_named("avx512");

}  // namespace nibble::cpu
