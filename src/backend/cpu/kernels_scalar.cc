#include "backend/cpu/simd/simd_scalar.h"
// The vocabulary comes first.
#include "backend/cpu/kernels/table.h"

namespace nibble::cpu {

const KernelTable kScalarKernels = kernels_named("scalar");

}  // namespace nibble::cpu
