#pragma once

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// All experts for all rows through cuBLASLt, BF16 and FP8, in the three ways of a published port
/// of gpt-oss: a product for each expert, planned anew for every call or planned once, and one
/// product of a batch of all experts. Only to compare with.
extern const GemmEntry kExpertsCublasLtRebuilt;
extern const GemmEntry kExpertsCublasLtCached;
extern const GemmEntry kExpertsCublasLtStrided;

}  // namespace nibble::cuda
