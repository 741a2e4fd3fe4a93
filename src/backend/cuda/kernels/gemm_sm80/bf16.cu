// y = x [m, k] bf16 · w [n, k]ᵀ bf16, sums in f32.
// Method, layouts and limits: gemm_sm80/mma.cuh.

#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

namespace nibble::cuda {
namespace {

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.weight.code == WeightCode::kBf16 && problem.act == ActFormat::kBf16 &&
         !problem.weight.quantized() && sm80::fits(problem, device);
}

}  // namespace

const GemmEntry kGemmBf16Sm80 = {"gemm_bf16_sm80", accepts, sm80::GemmMma<sm80::CodecBf16>::make,
                                 true};

}  // namespace nibble::cuda
