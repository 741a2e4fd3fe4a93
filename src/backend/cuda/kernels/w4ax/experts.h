#pragma once

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// The experts of a layer: INT4 weights times rows in blocks of 4 and 8 bits, for sm_80 and up.
extern const GemmEntry kExpertsW4Ax;

}  // namespace nibble::cuda
