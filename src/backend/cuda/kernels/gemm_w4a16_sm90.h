#pragma once

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// INT4 weights with a BF16 scale for each 32 or 128 of K, BF16 activations.
extern const GemmEntry kGemmW4A16Sm90;

}  // namespace nibble::cuda
