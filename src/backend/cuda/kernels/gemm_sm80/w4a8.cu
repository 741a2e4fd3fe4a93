// y = x [m, k] int8 per token · w [n, k]ᵀ int4 per channel, exact sums in s32.
// Method, layouts and limits: gemm_sm80/mma.cuh.

#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

namespace nibble::cuda {
namespace {

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  // Blocks of 4 and 8 bits that share a scale, as they do with weights per channel, are INT8 here.
  const bool int8 = problem.act == ActFormat::kInt8Token || problem.act == ActFormat::kIntBlocks;
  return problem.weight.code == WeightCode::kInt4 && int8 &&
         problem.weight.scale_per == ScalePer::kChannel && sm80::fits(problem, device);
}

}  // namespace

const GemmEntry kGemmW4A8Sm80 = {"gemm_w4a8_sm80", accepts, sm80::GemmMma<sm80::CodecW4A8>::make,
                                 true};

}  // namespace nibble::cuda
