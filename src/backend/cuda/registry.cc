#include <array>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/kernels/gemm_bf16_cublaslt.h"
#include "backend/cuda/kernels/gemm_sm90.h"

namespace nibble::cuda {

std::span<const GemmEntry> gemm_entries() {
  static const std::array kEntries = {
      kGemmBf16CublasLt,
      kGemmW4A8Sm90,
      kGemmW8A8Int8Sm90,
      kGemmW8A8Fp8Sm90,
  };
  return kEntries;
}

}  // namespace nibble::cuda
