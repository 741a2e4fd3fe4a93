#pragma once

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// BF16 weights and activations through cuBLASLt.
extern const GemmEntry kGemmBf16CublasLt;

}  // namespace nibble::cuda
