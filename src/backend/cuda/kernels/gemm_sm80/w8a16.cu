// y = x [m, k] bf16 · w [n, k]ᵀ int8 per channel, sums in f32, scaled once at the end.
// Method, layouts and limits: gemm_sm80/mma.cuh.

#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

namespace nibble::cuda {
namespace {

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.weight.code == WeightCode::kInt8 && problem.act == ActFormat::kBf16 &&
         problem.weight.scale_per == ScalePer::kChannel && sm80::fits(problem, device);
}

}  // namespace

const GemmEntry kGemmW8A16Sm80 = {"gemm_w8a16_sm80", accepts,
                                  sm80::GemmMma<sm80::CodecW8A16>::make};

}  // namespace nibble::cuda
