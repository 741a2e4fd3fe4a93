// y = x [m, k] bf16 · w [n, k]ᵀ E2M1 with a power of two per 32 of k (MXFP4), sums in f32.
// Method, layouts and limits: gemm_sm80/mma.cuh.

#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

namespace nibble::cuda {
namespace {

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  return weight.code == WeightCode::kFp4E2M1 && problem.act == ActFormat::kBf16 &&
         weight.scale_per == ScalePer::kGroup && weight.scale_dtype == DType::kF8E8M0 &&
         weight.group_size == 32 && sm80::fits(problem, device);
}

}  // namespace

const GemmEntry kGemmMxfp4Sm80 = {"gemm_mxfp4_sm80", accepts,
                                  sm80::GemmMma<sm80::CodecFp4A16>::make, true};

}  // namespace nibble::cuda
