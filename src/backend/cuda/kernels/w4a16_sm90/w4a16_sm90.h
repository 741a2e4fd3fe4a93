#pragma once

#include <memory>

#include "backend/cuda/gemm_kernel.h"

namespace nibble::cuda {

/// INT4 weights with a BF16 scale for each 32 or 128 of K, BF16 activations.
extern const GemmEntry kGemmW4A16Sm90;

/// The part of it that serves many tokens, a GemmSm90: for benchmarks of its tiles.
[[nodiscard]] Result<std::unique_ptr<GemmKernel>> make_w4a16_wide(const GemmProblem& problem,
                                                                  const DeviceInfo& device);

}  // namespace nibble::cuda
