#include <array>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/kernels/cublaslt/bf16_cublaslt.h"
#include "backend/cuda/kernels/cublaslt/experts_cublaslt.h"
#include "backend/cuda/kernels/experts_sm90/experts_sm90.h"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"
#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"
#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.h"
#include "backend/cuda/kernels/w4ax/experts.h"
#include "backend/cuda/kernels/w4ax/w4ax_sm80.h"
#include "backend/cuda/kernels/w4ax/w4ax_sm90.h"

namespace nibble::cuda {

std::span<const GemmEntry> gemm_entries() {
  static const std::array kEntries = {
      kGemmBf16Sm90,
      kGemmBf16CublasLt,
      kGemmW4A16Sm90,
      kGemmW4A8Sm90,
      kGemmW4A8LevelsSm90,
      kGemmW4A8Bf16Sm90,
      kGemmW8A8Int8Sm90,
      kGemmW8A8Fp8Sm90,
      kGemmW8A16Sm90,
      kGemmW4A16ChannelSm90,
      kGemmMxfp4Sm90,
      kGemmMxfp4Fp8Sm90,
      kGemmW4AxSm90,
      kExpertsW4A16Sm90,
      kExpertsW4Ax,
      // For every shape with k % 64 == 0, on sm_80 and up.
      kGemmW4A8Sm80,
      kGemmW4A8Bf16Sm80,
      kGemmW4AxSm80,
      kGemmW8A8Int8Sm80,
      kGemmW8A8Fp8Sm89,
      kGemmW8A8Fp8BlockSm89,
      kGemmW8A16Sm80,
      kGemmW4A16Sm80,
      kGemmW4A16ChannelSm80,
      kGemmW4A16ZerosSm80,
      kGemmW4A16MinimumsSm80,
      kGemmMxfp4Sm80,
      kGemmBf16Sm80,
      // To compare with: only where --kernel names them.
      kExpertsCublasLtRebuilt,
      kExpertsCublasLtCached,
      kExpertsCublasLtStrided,
  };
  return kEntries;
}

}  // namespace nibble::cuda
