// y[e] [m, n] = x [m, k] · w[e] [n, k]ᵀ (+ bias[e]) for every expert e of a layer through cuBLASLt,
// BF16 and E4M3, sums in f32. On Hopper cuBLASLt takes one scale for each operand, here 1: a kernel
// behind the products multiplies what they left in y by the scales of rows and channels and adds
// the bias. In BF16 that rounds twice, where there are scales or a bias.
// Packed weights are the canonical codes, of E4M3 with the scales of channels [n] f32 behind them.
// Source: cuBLASLt's reference in the CUDA Toolkit documentation.

#include <cuda_bf16.h>

#include "backend/cuda/all_experts.h"
#include "backend/cuda/cublaslt.h"
#include "backend/cuda/kernels/cublaslt/experts_cublaslt.h"
#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "base/log.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int kScaleThreads = 128;
constexpr size_t kExpertAlignment = 128;  // of AllExpertsLaunch::expert_bytes
constexpr int64_t kMostPlannedRows = 64;  // while a model is loaded

/// How the products of all experts are called.
enum class Way : uint8_t {
  kRebuilt,  // one by one, planned anew each time
  kCached,   // one by one
  kStrided,  // at once
};

struct ScaleArgs {
  void* y = nullptr;                // [experts, rows, n]
  const float* x_scales = nullptr;  // [rows] or [experts, rows]
  int64_t x_expert_rows = 0;
  const uint8_t* scales = nullptr;  // [n] f32 of the first expert, or none: x has none either
  int64_t expert_bytes = 0;
  const float* bias = nullptr;  // [experts, n], or none
  int64_t rows = 0;
  int64_t n = 0;
};

__device__ __forceinline__ F32x8 load_piece(const float* y) { return load_f32x8(y); }
__device__ __forceinline__ F32x8 load_piece(const __nv_bfloat16* y) { return load_bf16x8(y); }

__device__ __forceinline__ void store_piece(__nv_bfloat16* y, const F32x8& x) {
  store_bf16x8(y, x);
}
__device__ __forceinline__ void store_piece(float* y, const F32x8& x) {
  *reinterpret_cast<float4*>(y) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  *reinterpret_cast<float4*>(y + 4) = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

/// y * the scale of its row * those of its columns + bias, in place; a thread has eight columns.
template <typename Y>
__global__ __launch_bounds__(kScaleThreads) void scale_kernel(const ScaleArgs args) {
  ptx::allow_successor();
  const int64_t expert = blockIdx.x / args.rows;
  const int64_t row = blockIdx.x % args.rows;
  const int64_t column = (int64_t{blockIdx.y} * kScaleThreads + threadIdx.x) * kPiece;
  if (column >= args.n) {
    return;
  }
  F32x8 bias = {};
  if (args.bias != nullptr) {
    bias = load_f32x8(args.bias + expert * args.n + column);
  }
  F32x8 scales = {{1, 1, 1, 1, 1, 1, 1, 1}};
  if (args.scales != nullptr) {
    const uint8_t* own = args.scales + expert * args.expert_bytes;
    scales = load_f32x8(reinterpret_cast<const float*>(own) + column);
  }
  ptx::wait_for_predecessor();
  const float row_scale =
      args.scales != nullptr ? args.x_scales[expert * args.x_expert_rows + row] : 1.0F;
  Y* y = static_cast<Y*>(args.y) + int64_t{blockIdx.x} * args.n + column;
  F32x8 values = load_piece(y);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    values.v[i] = __fmaf_rn(values.v[i], row_scale * scales.v[i], bias.v[i]);
  }
  store_piece(y, values);
}

class ExpertsCublasLt final : public AllExpertsGemm {
 public:
  ExpertsCublasLt(const GemmProblem& problem, Way way, std::shared_ptr<CublasLt> library)
      : n_(problem.n),
        k_(problem.k),
        fp8_(problem.act == ActFormat::kFp8Token),
        way_(way),
        library_(std::move(library)) {}

  [[nodiscard]] size_t packed_bytes() const override {
    return code_bytes() + (fp8_ ? scale_bytes() : 0);
  }
  [[nodiscard]] bool packs_nothing() const override { return !fp8_; }

  cudaError_t pack(const void* codes,
                   const float* scales,
                   void* packed,
                   cudaStream_t stream) const override {
    const cudaError_t error =
        cudaMemcpyAsync(packed, codes, code_bytes(), cudaMemcpyDeviceToDevice, stream);
    return error != cudaSuccess || !fp8_
               ? error
               : cudaMemcpyAsync(static_cast<uint8_t*>(packed) + code_bytes(), scales,
                                 scale_bytes(), cudaMemcpyDeviceToDevice, stream);
  }
  cudaError_t unpack(const void* packed,
                     void* codes,
                     float* scales,
                     cudaStream_t stream) const override {
    const cudaError_t error =
        cudaMemcpyAsync(codes, packed, code_bytes(), cudaMemcpyDeviceToDevice, stream);
    return error != cudaSuccess || !fp8_
               ? error
               : cudaMemcpyAsync(scales, static_cast<const uint8_t*>(packed) + code_bytes(),
                                 scale_bytes(), cudaMemcpyDeviceToDevice, stream);
  }

  [[nodiscard]] size_t workspace_bytes(int64_t /*max_m*/) const override { return 0; }
  [[nodiscard]] bool recordable() const override { return way_ != Way::kRebuilt; }

  /// One expert alone, as the self-test runs it.
  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const override {
    if (args.y_stride != n_) {
      return cudaErrorInvalidValue;
    }
    return run_all({.x = args.x,
                    .x_scales = args.x_scales,
                    .packed = args.packed,
                    .bias = args.bias,
                    .y = args.y,
                    .result = args.result,
                    .experts = 1,
                    .rows = args.m},
                   context);
  }

  cudaError_t run_all(const AllExpertsLaunch& args, const LaunchContext& context) const override {
    if (args.result == GemmResult::kAddF32) {
      return cudaErrorInvalidValue;
    }
    if (args.rows == 0) {
      return cudaSuccess;
    }
    const cudaError_t error = multiply(args, context.stream);
    return error == cudaSuccess && (fp8_ || args.bias != nullptr) ? scale(args, context) : error;
  }

  /// Plans for the sizes of small steps; others are planned when they first occur.
  Status plan(int64_t experts, WeightRows rows) const {
    const bool gate_up = rows == WeightRows::kGateUp;
    const int64_t most = std::min(kMostPlannedRows, most_rows(experts));
    for (int64_t m = 1; m <= most; m *= 2) {
      const AllExpertsLaunch args{
          .x_expert_rows = gate_up ? 0 : m,
          .expert_bytes = static_cast<int64_t>(round_up(packed_bytes(), kExpertAlignment)),
          .result = gate_up ? GemmResult::kBf16 : GemmResult::kF32,
          .experts = experts,
          .rows = m};
      NIBBLE_RETURN_IF_ERROR(library_->plan_exactly(problem_of(args)));
    }
    return {};
  }

 private:
  [[nodiscard]] int64_t element_bytes() const { return fp8_ ? 1 : 2; }
  [[nodiscard]] size_t code_bytes() const { return static_cast<size_t>(n_ * k_ * element_bytes()); }
  [[nodiscard]] size_t scale_bytes() const { return static_cast<size_t>(n_) * sizeof(float); }

  /// Of one call: all experts, or one of them.
  [[nodiscard]] CublasLtProblem problem_of(const AllExpertsLaunch& args) const {
    CublasLtProblem problem{.m = args.rows,
                            .n = n_,
                            .k = k_,
                            .y_stride = n_,
                            .f32_result = args.result == GemmResult::kF32,
                            .fp8 = fp8_};
    if (way_ == Way::kStrided && args.experts > 1) {
      problem.batch = {.count = args.experts,
                       .x = args.x_expert_rows * k_,
                       .w = args.expert_bytes / element_bytes(),
                       .y = args.rows * n_};
    }
    return problem;
  }

  cudaError_t multiply(const AllExpertsLaunch& args, cudaStream_t stream) const {
    using Planning = CublasLt::Planning;
    const CublasLtProblem problem = problem_of(args);
    const auto* x = static_cast<const uint8_t*>(args.x);
    const auto* w = static_cast<const uint8_t*>(args.packed);
    auto* y = static_cast<uint8_t*>(args.y);
    const int64_t x_bytes = args.x_expert_rows * k_ * element_bytes();
    const int64_t y_bytes = args.rows * n_ * (problem.f32_result ? 4 : 2);
    const int64_t calls = way_ == Way::kStrided ? 1 : args.experts;
    for (int64_t e = 0; e < calls; ++e) {
      const Status status = library_->run_exactly(
          problem, {.x = x + e * x_bytes, .w = w + e * args.expert_bytes, .y = y + e * y_bytes},
          way_ == Way::kRebuilt ? Planning::kRebuilt : Planning::kKept, stream);
      if (!status.ok()) {
        NIBBLE_LOG(kError, "experts [{}, {}] of {} rows: {}", n_, k_, args.rows, status.message());
        return cudaErrorLaunchFailure;
      }
    }
    return cudaSuccess;
  }

  cudaError_t scale(const AllExpertsLaunch& args, const LaunchContext& context) const {
    const auto* packed = static_cast<const uint8_t*>(args.packed);
    const ScaleArgs scale{.y = args.y,
                          .x_scales = args.x_scales,
                          .x_expert_rows = args.x_expert_rows,
                          .scales = fp8_ ? packed + code_bytes() : nullptr,
                          .expert_bytes = args.expert_bytes,
                          .bias = args.bias,
                          .rows = args.rows,
                          .n = n_};
    const int64_t parts = (n_ / kPiece + kScaleThreads - 1) / kScaleThreads;
    const Grid grid{.blocks = dim3(static_cast<unsigned>(args.experts * args.rows),
                                   static_cast<unsigned>(parts)),
                    .threads = kScaleThreads};
    return args.result == GemmResult::kF32
               ? launch(scale_kernel<float>, grid, context, scale)
               : launch(scale_kernel<__nv_bfloat16>, grid, context, scale);
  }

  int64_t n_, k_;
  bool fp8_;
  Way way_;
  std::shared_ptr<CublasLt> library_;
};

/// Operands start at multiples of 16 bytes, whatever the expert and the rows.
bool accepts(const GemmProblem& problem, const DeviceInfo& device) {
  if (problem.experts < 1 || problem.n < 1 || problem.k < 1) {
    return false;
  }
  if (problem.act == ActFormat::kFp8Token) {
    return problem.weight.code == WeightCode::kFp8E4M3 &&
           problem.weight.scale_per == ScalePer::kChannel && problem.n % 16 == 0 &&
           problem.k % 16 == 0 && device.major * 10 + device.minor >= 89;
  }
  return problem.weight.code == WeightCode::kBf16 && !problem.weight.quantized() &&
         problem.act == ActFormat::kBf16 && problem.n % 8 == 0 && problem.k % 8 == 0 &&
         device.major >= 8;
}

template <Way way>
Result<std::unique_ptr<GemmKernel>> make(const GemmProblem& problem, const DeviceInfo& device) {
  NIBBLE_ASSIGN_OR_RETURN(std::shared_ptr<CublasLt> library, CublasLt::open(device));
  auto kernel = std::make_unique<ExpertsCublasLt>(problem, way, std::move(library));
  if (way != Way::kRebuilt) {
    NIBBLE_RETURN_IF_ERROR(kernel->plan(problem.experts, problem.rows));
  }
  return std::unique_ptr<GemmKernel>(std::move(kernel));
}

}  // namespace

const GemmEntry kExpertsCublasLtRebuilt = {"experts_cublaslt_rebuilt", accepts, make<Way::kRebuilt>,
                                           true, true};
const GemmEntry kExpertsCublasLtCached = {"experts_cublaslt_cached", accepts, make<Way::kCached>,
                                          true, true};
const GemmEntry kExpertsCublasLtStrided = {"experts_cublaslt_strided", accepts, make<Way::kStrided>,
                                           true, true};

}  // namespace nibble::cuda
