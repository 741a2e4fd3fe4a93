#include "backend/cpu/isa.h"
#include "backend/cpu/kernel_families.h"

namespace nibble::cpu {
namespace {

const KernelTable kAvx512{portable::kGemm, portable::kRows, portable::kAttention, TileKernels{},
                          "avx512"};
const KernelTable kAmx{portable::kGemm, portable::kRows, portable::kTileAttention, portable::kTiles,
                       "amx"};

/// All tests of the program then run the AVX-512 and the AMX kernels too.
[[maybe_unused]] const bool kRegistered = [] {
  if (detect_cpu_features().avx2) {
    set_stand_ins({.avx512 = &kAvx512, .amx = &kAmx});
  }
  return true;
}();

}  // namespace
}  // namespace nibble::cpu
