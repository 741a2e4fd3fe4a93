// y = x [m, k] E4M3 per token · w [n, k]ᵀ E4M3 per channel, sums in f32.
// Method, layouts and limits: gemm_sm80/mma.cuh.

#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

namespace nibble::cuda {
namespace {

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.weight.code == WeightCode::kFp8E4M3 && problem.act == ActFormat::kFp8Token &&
         problem.weight.scale_per == ScalePer::kChannel && sm80::runs_fp8(device) &&
         sm80::fits(problem, device);
}

}  // namespace

const GemmEntry kGemmW8A8Fp8Sm89 = {"gemm_w8a8_fp8_sm89", accepts,
                                    sm80::GemmMma<sm80::CodecFp8>::make, true};

}  // namespace nibble::cuda
