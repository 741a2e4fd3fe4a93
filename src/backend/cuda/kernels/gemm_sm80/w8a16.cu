// y = x [m, k] bf16 · w [n, k]ᵀ int8 with a scale per channel, or a BF16 one per 32 of k; sums in
// f32, scaled once at the end or after each group.
// Method, layouts and limits: gemm_sm80/mma.cuh.

#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

namespace nibble::cuda {
namespace {

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  const bool groups = weight.scale_per == ScalePer::kGroup && weight.group_size == 32 &&
                      weight.scale_dtype == DType::kBF16;
  return weight.code == WeightCode::kInt8 && problem.act == ActFormat::kBf16 &&
         (weight.scale_per == ScalePer::kChannel || groups) && sm80::fits(problem, device);
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  using enum ScalePer;
  return problem.weight.scale_per == kChannel
             ? sm80::GemmMma<sm80::CodecW8A16<kChannel>>::make(problem, device)
             : sm80::GemmMma<sm80::CodecW8A16<kGroup>>::make(problem, device);
}

}  // namespace

const GemmEntry kGemmW8A16Sm80 = {"gemm_w8a16_sm80", accepts, make, true};

}  // namespace nibble::cuda
