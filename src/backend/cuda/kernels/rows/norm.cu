// RMS norm of f32 rows, picked by an index or in order, rounded for the next matrix product.
// One block owns a row and reads it once; wide rows (above 32768) are read from the cache again.

#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

/// The sum of one value per thread of a block of a multiple of 32 threads, in a fixed order.
__device__ __forceinline__ float sum_of_block(float value, float* shared) {
  const auto sum_of_warp = [](float v) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      v += __shfl_xor_sync(kAllLanes, v, offset);
    }
    return v;
  };
  value = sum_of_warp(value);
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = value;
  }
  __syncthreads();
  return sum_of_warp(threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0.0F);
}

template <int kPieces>
__global__ __launch_bounds__(kMaxRowThreads) void rms_norm_kernel(const RmsNormArgs args) {
  constexpr int kKept = kPieces > 0 ? kPieces : 1;
  constexpr bool kEarly = kPieces == 1 || kPieces == 2;  // weights fit in registers beside the row
  F32x8 weight[kKept] = {};
  if constexpr (kEarly) {
    for_each_piece<kPieces>(args.n,
                            [&](int p, int64_t i) { weight[p] = load_f32x8(args.weight + i); });
  }
  ptx::allow_successor();
  ptx::wait_for_predecessor();

  const int64_t row = blockIdx.x;
  const int64_t source = args.row_index != nullptr ? args.row_index[row] : row;
  const float* x = args.x + source * args.n;
  F32x8 kept[kKept];
  float sum = 0.0F;
  for_each_piece<kPieces>(args.n, [&](int p, int64_t i) {
    kept[p] = load_f32x8(x + i);
#pragma unroll
    for (const float value : kept[p].v) {
      sum = fmaf(value, value, sum);
    }
  });
  __shared__ float shared[32];
  sum = sum_of_block(sum, shared);
  const float mean = sum / static_cast<float>(args.n);
  const float factor = 1.0F / sqrtf(mean + args.eps);

  const auto normalized = [&](int p, int64_t i) {
    F32x8 y = kPieces > 0 ? kept[p] : load_f32x8(x + i);
    const F32x8 w = kEarly ? weight[p] : load_f32x8(args.weight + i);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      y.v[j] = y.v[j] * factor * w.v[j];
    }
    return y;
  };
  if (args.out.format == ActFormat::kBf16) {
    auto* out = static_cast<__nv_bfloat16*>(args.out.values) + row * args.n;
    for_each_piece<kPieces>(args.n,
                            [&](int p, int64_t i) { store_bf16x8(out + i, normalized(p, i)); });
  } else {
    store_row<kPieces>(args.out, row, args.n, normalized);
  }
}

}  // namespace

cudaError_t rms_norm_quantize(const RmsNormArgs& args, const LaunchContext& context) {
  if (!can_store(args.out, args.rows, args.n)) {
    return cudaErrorInvalidValue;
  }
  static constexpr void (*kKernels[4])(RmsNormArgs) = {rms_norm_kernel<0>, rms_norm_kernel<1>,
                                                       rms_norm_kernel<2>, rms_norm_kernel<4>};
  return launch_rows(kKernels, args, context);
}

}  // namespace nibble::cuda
