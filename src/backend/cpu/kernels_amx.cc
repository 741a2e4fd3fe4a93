#include "backend/cpu/simd/simd_avx512.h"
// The vocabulary comes first.
#include "backend/cpu/kernels/table.h"

namespace nibble::cpu {

const KernelTable kAmxKernels = kernels_named("amx");

}  // namespace nibble::cpu
