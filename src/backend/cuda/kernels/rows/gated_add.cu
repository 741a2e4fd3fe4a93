// An expert that every token takes, as much of it as a gate says: one block for each row.

#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

__global__ __launch_bounds__(kThreads) void gated_add_kernel(const GatedRowsArgs args) {
  __shared__ float sums[kWarps];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = blockIdx.x;
  const auto* x = static_cast<const __nv_bfloat16*>(args.x) + row * args.n;
  float sum = 0.0F;
  for (int64_t i = int64_t{threadIdx.x} * kPiece; i < args.n; i += kThreads * kPiece) {
    const F32x8 values = load_bf16x8(x + i);
    const F32x8 gate = load_f32x8(args.gate + i);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      sum = __fmaf_rn(values.v[j], gate.v[j], sum);
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  if (threadIdx.x % 32 == 0) {
    sums[threadIdx.x / 32] = sum;
  }
  __syncthreads();
  float logit = 0.0F;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    logit += sums[warp];
  }
  const float weight = 1.0F / (1.0F + expf(-logit));
  const auto* added = static_cast<const __nv_bfloat16*>(args.rows) + row * args.n;
  for (int64_t i = int64_t{threadIdx.x} * kPiece; i < args.n; i += kThreads * kPiece) {
    const F32x8 values = load_bf16x8(added + i);
    float* y = args.y + row * args.n + i;
    const F32x8 given = load_f32x8(y);
    auto* out = reinterpret_cast<float4*>(y);
    float sum_of[kPiece];
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      sum_of[j] = __fadd_rn(given.v[j], __fmul_rn(values.v[j], weight));
    }
    out[0] = make_float4(sum_of[0], sum_of[1], sum_of[2], sum_of[3]);
    out[1] = make_float4(sum_of[4], sum_of[5], sum_of[6], sum_of[7]);
  }
}

}  // namespace

cudaError_t add_gated_rows(const GatedRowsArgs& args, const LaunchContext& context) {
  if (args.n % kPiece != 0 || args.count < 0 || args.count > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (args.count == 0) {
    return cudaSuccess;
  }
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.count)), .threads = kThreads};
  return launch(gated_add_kernel, grid, context, args);
}

}  // namespace nibble::cuda
