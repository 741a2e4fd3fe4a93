// y [m, n] (+)= x [m, k] bf16 · w [n, k]ᵀ bf16 (+ bias), sums in f32, through cuBLASLt, whose
// algorithms are chosen when the kernel is made: for every power of two up to 8192 rows. Packed
// weights are the canonical codes. cuBLASLt writes its workspace, so it has one of its own.
// Source: cuBLASLt's reference in the CUDA Toolkit documentation.

#include <cuda_bf16.h>

#include "backend/cuda/cublaslt.h"
#include "backend/cuda/kernels/cublaslt/bf16_cublaslt.h"
#include "backend/cuda/ptx/dependency.cuh"
#include "quant/quant_tensor.h"

namespace nibble::cuda {
namespace {

/// out [n] bf16 = bias [n] f32: cuBLASLt adds a bias of the result's type only.
__global__ void round_bias(const float* bias, __nv_bfloat16* out, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  ptx::wait_for_predecessor();
  if (i < n) {
    out[i] = __float2bfloat16_rn(bias[i]);
  }
}

class GemmBf16CublasLt final : public GemmKernel {
 public:
  GemmBf16CublasLt(const GemmProblem& problem, std::shared_ptr<CublasLt> library)
      : n_(problem.n), k_(problem.k), library_(std::move(library)) {}

  [[nodiscard]] size_t packed_bytes() const override { return static_cast<size_t>(n_ * k_ * 2); }
  [[nodiscard]] bool packs_nothing() const override { return true; }

  cudaError_t pack(const void* codes,
                   const float* /*scales*/,
                   void* packed,
                   cudaStream_t stream) const override {
    return cudaMemcpyAsync(packed, codes, packed_bytes(), cudaMemcpyDeviceToDevice, stream);
  }
  cudaError_t unpack(const void* packed,
                     void* codes,
                     float* /*scales*/,
                     cudaStream_t stream) const override {
    return cudaMemcpyAsync(codes, packed, packed_bytes(), cudaMemcpyDeviceToDevice, stream);
  }

  [[nodiscard]] size_t workspace_bytes(int64_t /*max_m*/) const override { return 0; }

  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    const bool f32 = args.result != GemmResult::kBf16;
    const void* bias = args.bias;
    if (bias != nullptr && !f32) {
      auto* rounded = static_cast<__nv_bfloat16*>(library_->scratch(context.stream));
      const auto blocks = static_cast<unsigned>((n_ + 255) / 256);
      const cudaError_t error = launch(round_bias, {.blocks = dim3(blocks), .threads = 256},
                                       context, args.bias, rounded, n_);
      if (error != cudaSuccess) {
        return error;
      }
      bias = rounded;
    }
    const Status status = library_->run({.m = args.m,
                                         .n = n_,
                                         .k = k_,
                                         .y_stride = args.y_stride,
                                         .f32_result = f32,
                                         .bias = bias != nullptr},
                                        {.x = args.x,
                                         .w = args.packed,
                                         .bias = bias,
                                         .y = args.y,
                                         .beta = args.result == GemmResult::kAddF32 ? 1.0F : 0.0F},
                                        context.stream);
    return status.ok() ? cudaSuccess : cudaErrorLaunchFailure;
  }

 private:
  int64_t n_, k_;
  std::shared_ptr<CublasLt> library_;
};

bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  return problem.weight.code == WeightCode::kBf16 && !problem.weight.quantized() &&
         problem.act == ActFormat::kBf16 && problem.n >= 1 && problem.k >= 8 &&
         problem.k % 8 == 0 && problem.n * 2 <= static_cast<int64_t>(CublasLt::kScratchBytes) &&
         device.major >= 8;
}

Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  NIBBLE_ASSIGN_OR_RETURN(std::shared_ptr<CublasLt> library, CublasLt::open(device));
  for (const bool f32 : {false, true}) {
    for (int64_t m = 1; m <= 8192; m *= 2) {
      NIBBLE_RETURN_IF_ERROR(library->plan(
          {.m = m, .n = problem.n, .k = problem.k, .y_stride = problem.n, .f32_result = f32}));
    }
  }
  return std::unique_ptr<GemmKernel>(
      std::make_unique<GemmBf16CublasLt>(problem, std::move(library)));
}

}  // namespace

const GemmEntry kGemmBf16CublasLt = {"gemm_bf16_cublaslt", accepts, make};

}  // namespace nibble::cuda
