#pragma once

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// Matrix products by mma.sync for sm_80 and up (gemm_sm80/mma.cuh), for every n and k % 64 == 0.
extern const GemmEntry kGemmW4A8Sm80;
extern const GemmEntry kGemmW4A8Bf16Sm80;  // k % 32 == 0
extern const GemmEntry kGemmW8A8Int8Sm80;
extern const GemmEntry kGemmW8A8Fp8Sm89;       // needs sm_89
extern const GemmEntry kGemmW8A8Fp8BlockSm89;  // as well
extern const GemmEntry kGemmW8A16Sm80;
extern const GemmEntry kGemmW4A16Sm80;
extern const GemmEntry kGemmW4A16ChannelSm80;   // groups of 32 or 128 with BF16 scales
extern const GemmEntry kGemmW4A16ChannelSm80;   // a scale per channel
extern const GemmEntry kGemmW4A16ZerosSm80;     // the same with zero points
extern const GemmEntry kGemmW4A16MinimumsSm80;  // groups of 32 with BF16 scales and minimums
extern const GemmEntry kGemmMxfp4Sm80;
extern const GemmEntry kGemmBf16Sm80;

}  // namespace nibble::cuda
