#include "backend/cpu/isa.h"

namespace nibble::cpu {

extern const KernelTable kAmxEmulatedKernels;

namespace {

/// All tests of the program then run the AMX kernels too, on emulated tiles where there is no AMX.
[[maybe_unused]] const bool kRegistered = [] {
  const CpuFeatures features = detect_cpu_features();
  if (!features.amx && features.avx512_vnni && __builtin_cpu_supports("avx512bf16") != 0) {
    set_amx_stand_in(&kAmxEmulatedKernels);
  }
  return true;
}();

}  // namespace
}  // namespace nibble::cpu
