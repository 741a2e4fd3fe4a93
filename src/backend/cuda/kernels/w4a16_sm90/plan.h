#pragma once

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.h"

namespace nibble::cuda {

/// How the blocks of w4a16_sm90/w4a16_sm90.cuh share a product: tiles as they are, in runs of equal
/// length, or each by a cluster, whichever is reckoned to be the fastest.
[[nodiscard]] GemmSm90Plan plan_w4a16(const GemmSm90Tile& tile, const GemmSm90Sizes& sizes);

}  // namespace nibble::cuda
