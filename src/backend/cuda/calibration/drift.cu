// What making good for roundings in front of a product needs beside products of matrices.

#include <cuda_bf16.h>

#include "backend/cuda/calibration/drift_kernels.h"
#include "backend/cuda/calibration/kernels.h"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlock = static_cast<int>(kFactorBlock);
constexpr int kPitch = kBlock + 1;

unsigned blocks_of(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__device__ __forceinline__ float number(const void* from, int64_t i) {
  return __bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]);
}

__global__ __launch_bounds__(kThreads) void changes_kernel(const RowChangesArgs args) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.count) {
    return;
  }
  float change = __fsub_rn(number(args.wanted, i), number(args.x_high, i));
  if (args.x_low != nullptr) {
    change = __fsub_rn(change, number(args.x_low, i));
  }
  const __nv_bfloat16 high = __float2bfloat16_rn(change);
  static_cast<__nv_bfloat16*>(args.high)[i] = high;
  static_cast<__nv_bfloat16*>(args.low)[i] =
      __float2bfloat16_rn(__fsub_rn(change, __bfloat162float(high)));
}

__global__ __launch_bounds__(kThreads) void order_kernel(const OrderedSumsArgs args) {
  const int64_t at = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (at < args.k * args.k) {
    const int64_t i = at / args.k;
    args.to[at] = args.from[int64_t{args.order[i]} * args.k + args.order[at - i * args.k]];
  }
}

__global__ __launch_bounds__(kThreads) void find_kernel(const float* from,
                                                        int64_t count,
                                                        int32_t* found) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count && !isfinite(from[i])) {
    *found = 1;
  }
}

/// A thread for each column of the inverse, from its diagonal up.
__global__ __launch_bounds__(kBlock) void invert_kernel(const InvertUpperArgs args) {
  extern __shared__ float memory[];
  const auto count = static_cast<int>(args.count);
  float* upper = memory;                     // [kBlock, kPitch]
  float* inverse = upper + kBlock * kPitch;  // likewise
  for (int i = static_cast<int>(threadIdx.x); i < count * count; i += kBlock) {
    const int row = i / count;
    const int column = i % count;
    upper[row * kPitch + column] = args.a[row * args.stride + column];
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column >= count) {
    return;
  }
  inverse[column * kPitch + column] = 1.0F / upper[column * kPitch + column];
  for (int i = column - 1; i >= 0; --i) {
    float sum = 0.0F;
    for (int m = i + 1; m <= column; ++m) {
      sum += upper[i * kPitch + m] * inverse[m * kPitch + column];
    }
    inverse[i * kPitch + column] = -sum / upper[i * kPitch + i];
  }
  for (int i = 0; i < count; ++i) {
    args.inverse[i * kBlock + column] = i <= column ? inverse[i * kPitch + column] : 0.0F;
  }
}

}  // namespace

cudaError_t split_changes(const RowChangesArgs& args, cudaStream_t stream) {
  if (args.count > 0) {
    changes_kernel<<<blocks_of(args.count), kThreads, 0, stream>>>(args);
  }
  return cudaGetLastError();
}

cudaError_t order_sums(const OrderedSumsArgs& args, cudaStream_t stream) {
  order_kernel<<<blocks_of(args.k * args.k), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t find_no_number(const float* from, int64_t count, int32_t* found, cudaStream_t stream) {
  find_kernel<<<blocks_of(count), kThreads, 0, stream>>>(from, count, found);
  return cudaGetLastError();
}

cudaError_t invert_upper(const InvertUpperArgs& args, cudaStream_t stream) {
  if (args.count < 1 || args.count > kFactorBlock) {
    return cudaErrorInvalidValue;
  }
  constexpr int kBytes = 2 * kBlock * kPitch * static_cast<int>(sizeof(float));
  const cudaError_t raised =
      cudaFuncSetAttribute(invert_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (raised != cudaSuccess) {
    return raised;
  }
  invert_kernel<<<1, kBlock, kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace nibble::cuda
