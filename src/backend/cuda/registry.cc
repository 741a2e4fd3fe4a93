#include <array>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/kernels/gemm_bf16_cublaslt.h"

namespace nibble::cuda {

std::span<const GemmEntry> gemm_entries() {
  static const std::array kEntries = {
      kGemmBf16CublasLt,
  };
  return kEntries;
}

}  // namespace nibble::cuda
