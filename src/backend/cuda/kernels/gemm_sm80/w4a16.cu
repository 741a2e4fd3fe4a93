// y = x [m, k] bf16 · w [n, k]ᵀ int4 with a BF16 scale per 32 or 128 of k, and maybe a zero
// point, or of groups of 32 a minimum, or with a scale per channel; sums in f32.
// Method, layouts and limits: gemm_sm80/mma.cuh.

#include "backend/cuda/kernels/gemm_sm80/family.cuh"
#include "backend/cuda/kernels/gemm_sm80/gemm_sm80.h"

namespace nibble::cuda {
namespace {

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  const WeightFormat& weight = problem.weight;
  return weight.code == WeightCode::kInt4 && problem.act == ActFormat::kBf16 &&
         weight.scale_per == ScalePer::kGroup && weight.scale_dtype == DType::kBF16 &&
         (weight.group_size == 32 || weight.group_size == 128) &&
         problem.k % weight.group_size == 0 && sm80::fits(problem, device);
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.weight.group_size == 32
             ? sm80::GemmMma<sm80::CodecW4A16<32>>::make(problem, device)
             : sm80::GemmMma<sm80::CodecW4A16<128>>::make(problem, device);
}

bool accepts_channel(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.weight.code == WeightCode::kInt4 && problem.act == ActFormat::kBf16 &&
         problem.weight.scale_per == ScalePer::kChannel && sm80::fits(problem, device);
}

bool accepts_zeros(const GemmProblem& problem, const DeviceInfo& device) {
  GemmProblem without = problem;
  without.weight.zero_points = ZeroPoints::kNone;
  return problem.weight.zero_points == ZeroPoints::kPerScale && accepts(without, device);
}

Result<std::unique_ptr<GemmKernel>> make_zeros(const GemmProblem& problem,
                                               const DeviceInfo& device) {
  return problem.weight.group_size == 32
             ? sm80::GemmMma<sm80::CodecW4A16<32, sm80::Offsets::kZeros>>::make(problem, device)
             : sm80::GemmMma<sm80::CodecW4A16<128, sm80::Offsets::kZeros>>::make(problem, device);
}

bool accepts_minimums(const GemmProblem& problem, const DeviceInfo& device) {
  GemmProblem without = problem;
  without.weight.zero_points = ZeroPoints::kNone;
  return problem.weight.zero_points == ZeroPoints::kMinimum && problem.weight.group_size == 32 &&
         accepts(without, device);
}

}  // namespace

const GemmEntry kGemmW4A16Sm80 = {"gemm_w4a16_sm80", accepts, make, true};
const GemmEntry kGemmW4A16ChannelSm80 = {"gemm_w4a16_channel_sm80", accepts_channel,
                                         sm80::GemmMma<sm80::CodecW4A16Channel>::make, true};
const GemmEntry kGemmW4A16ZerosSm80 = {"gemm_w4a16_zeros_sm80", accepts_zeros, make_zeros, true};
const GemmEntry kGemmW4A16MinimumsSm80 = {
    "gemm_w4a16_minimums_sm80", accepts_minimums,
    sm80::GemmMma<sm80::CodecW4A16<32, sm80::Offsets::kMinimums>>::make, true};

}  // namespace nibble::cuda
