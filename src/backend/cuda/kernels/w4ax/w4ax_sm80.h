#pragma once

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// INT4 weights times rows in blocks of 4 and 8 bits by mma.sync, for sm_80 and up.
extern const GemmEntry kGemmW4AxSm80;

}  // namespace nibble::cuda
