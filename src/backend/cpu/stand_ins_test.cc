#include "backend/cpu/isa.h"

namespace nibble::cpu {

extern const KernelTable kAvx512PortableKernels;
extern const KernelTable kAmxPortableKernels;

namespace {

/// All tests of the program then run the AVX-512 and the AMX kernels too.
[[maybe_unused]] const bool kRegistered = [] {
  if (detect_cpu_features().avx2) {
    set_stand_ins({.avx512 = &kAvx512PortableKernels, .amx = &kAmxPortableKernels});
  }
  return true;
}();

}  // namespace
}  // namespace nibble::cpu
