#include "backend/cpu/simd/simd_avx2.h"
// The vocabulary comes first.
#include "backend/cpu/kernels/table.h"

namespace nibble::cpu {

const KernelTable kAvx2VnniKernels = kernels_named("avx2_vnni");

}  // namespace nibble::cpu
