// y = x [m, k] int8 per token · w [n, k]ᵀ int8 per channel, exact sums in s32.
// Method, layouts and limits: gemm_sm80/mma.cuh.

#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

namespace nibble::cuda {
namespace {

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.weight.code == WeightCode::kInt8 && problem.act == ActFormat::kInt8Token &&
         problem.weight.scale_per == ScalePer::kChannel && sm80::fits(problem, device);
}

}  // namespace

const GemmEntry kGemmW8A8Int8Sm80 = {"gemm_w8a8_int8_sm80", accepts,
                                     sm80::GemmMma<sm80::CodecW8A8>::make, true};

}  // namespace nibble::cuda
