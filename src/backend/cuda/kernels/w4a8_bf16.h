#pragma once

#include "backend/gemm_problem.h"

namespace nibble::cuda {

/// Whether weights are INT4 with a scale for each channel and rows in blocks of INT8 and BF16, of
/// any size of which sums of INT8 stay within an int32: 16 * 8 * 127 times k.
[[nodiscard]] inline bool is_w4a8_bf16(const GemmProblem& problem) {
  constexpr int64_t kMostK = 131008;
  return problem.weight.code == WeightCode::kInt4 &&
         problem.weight.scale_per == ScalePer::kChannel &&
         problem.weight.zero_points == ZeroPoints::kNone && problem.act == ActFormat::kBf16Blocks &&
         problem.experts == 0 && problem.n >= 1 && problem.k >= 32 && problem.k % 32 == 0 &&
         problem.k <= kMostK;
}

}  // namespace nibble::cuda
