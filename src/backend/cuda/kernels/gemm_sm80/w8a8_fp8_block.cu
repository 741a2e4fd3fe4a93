// y = x [m, k] E4M3 per token and 128 of k · w [n, k]ᵀ E4M3 per block of 128 x 128, sums in f32.
// Method, layouts and limits: gemm_sm80/mma.cuh.

#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

namespace nibble::cuda {
namespace {

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  return weight.code == WeightCode::kFp8E4M3 && problem.act == ActFormat::kFp8Group &&
         weight.scale_per == ScalePer::kBlock && weight.group_size == 128 &&
         sm80::runs_fp8(device) && sm80::fits(problem, device);
}

}  // namespace

const GemmEntry kGemmW8A8Fp8BlockSm89 = {"gemm_w8a8_fp8_block_sm89", accepts,
                                         sm80::GemmMma<sm80::CodecFp8Groups>::make, true};

}  // namespace nibble::cuda
