// Matrices as calibration needs them: split, completed, turned, subtracted, multiplied.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "backend/cuda/calibration/kernels.h"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 32;
constexpr int kTileRows = 8;

unsigned blocks_of(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

dim3 tiles_of(int64_t columns, int64_t rows) {
  return {static_cast<unsigned>((columns + kTile - 1) / kTile),
          static_cast<unsigned>((rows + kTile - 1) / kTile)};
}

__device__ __forceinline__ float number(int8_t code) { return static_cast<float>(code); }
__device__ __forceinline__ float number(__nv_fp8_e4m3 code) { return static_cast<float>(code); }

template <typename Code>
__global__ __launch_bounds__(kThreads) void split_kernel(const SplitRowsArgs args, int64_t group) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= args.count * args.k) {
    return;
  }
  const int64_t row = i / args.k;
  const int64_t scales = (args.k + group - 1) / group;
  const float scale = args.rows.scales[row * scales + (i - row * args.k) / group];
  const float x = __fmul_rn(number(static_cast<const Code*>(args.rows.values)[i]), scale);
  const __nv_bfloat16 high = __float2bfloat16_rn(x);
  static_cast<__nv_bfloat16*>(args.high)[i] = high;
  static_cast<__nv_bfloat16*>(args.low)[i] =
      __float2bfloat16_rn(__fsub_rn(x, __bfloat162float(high)));
}

/// A tile below the diagonal, or on it, and the one that it becomes above.
__global__ void complete_kernel(float* h, int64_t k) {
  __shared__ float tile[kTile][kTile + 1];
  if (blockIdx.x > blockIdx.y) {
    return;
  }
  const int64_t row = int64_t{blockIdx.y} * kTile;
  const int64_t column = int64_t{blockIdx.x} * kTile;
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int64_t i = row + y;
    const int64_t j = column + threadIdx.x;
    if (i < k && j < k) {
      tile[y][threadIdx.x] = h[i * k + j];
    }
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int64_t i = column + y;
    const int64_t j = row + threadIdx.x;
    if (i < j && j < k) {
      h[i * k + j] = tile[threadIdx.x][y];
    }
  }
}

__global__ __launch_bounds__(kThreads) void diagonal_kernel(const float* h, int64_t k, float* out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < k) {
    out[i] = h[i * k + i];
  }
}

__global__ __launch_bounds__(kThreads) void add_kernel(const float* from,
                                                       double factor,
                                                       int64_t count,
                                                       float* to) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) {
    to[i] = __fadd_rn(to[i], static_cast<float>(factor * static_cast<double>(from[i])));
  }
}

__global__ void turn_kernel(const TurnArgs args) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t p = int64_t{blockIdx.x} * kTile + threadIdx.x;
  const int64_t first = int64_t{blockIdx.y} * kTile;
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int64_t row = first + y;
    float value = args.rest;
    if (p < args.k && row < args.rows) {
      value = args.from[row * args.k + (args.order == nullptr ? p : args.order[p])];
    }
    tile[y][threadIdx.x] = value;
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int64_t column = int64_t{blockIdx.x} * kTile + y;
    if (column < args.k) {
      args.to[column * args.stride + first + threadIdx.x] = tile[threadIdx.x][y];
    }
  }
}

__global__ void turn_back_kernel(const TurnArgs args) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t first = int64_t{blockIdx.y} * kTile;
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int64_t column = int64_t{blockIdx.x} * kTile + y;
    if (column < args.k) {
      tile[y][threadIdx.x] = args.from[column * args.stride + first + threadIdx.x];
    }
  }
  __syncthreads();
  const int64_t p = int64_t{blockIdx.x} * kTile + threadIdx.x;
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += kTileRows) {
    const int64_t row = first + y;
    if (p < args.k && row < args.rows) {
      args.to[row * args.k + (args.order == nullptr ? p : args.order[p])] = tile[threadIdx.x][y];
    }
  }
}

__global__ __launch_bounds__(kThreads) void subtract_kernel(const float* a,
                                                            const float* b,
                                                            int64_t count,
                                                            float* to) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) {
    to[i] = __fsub_rn(a[i], b[i]);
  }
}

__global__ __launch_bounds__(kThreads) void dot_kernel(const float* a,
                                                       const float* b,
                                                       int64_t count,
                                                       double* parts) {
  __shared__ double sums[kThreads];
  double sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count;
       i += kDotParts * kThreads) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  sums[threadIdx.x] = sum;
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      sums[threadIdx.x] += sums[threadIdx.x + half];
    }
  }
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = sums[0];
  }
}

}  // namespace

cudaError_t split_rows(const SplitRowsArgs& args, cudaStream_t stream) {
  if (row_scales(args.rows.format, args.k) == 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t group = args.rows.format == ActFormat::kFp8Group ? kFp8GroupSize : args.k;
  const unsigned blocks = blocks_of(args.count * args.k);
  if (blocks == 0) {
    return cudaSuccess;
  }
  if (args.rows.format == ActFormat::kInt8Token) {
    split_kernel<int8_t><<<blocks, kThreads, 0, stream>>>(args, group);
  } else {
    split_kernel<__nv_fp8_e4m3><<<blocks, kThreads, 0, stream>>>(args, group);
  }
  return cudaGetLastError();
}

cudaError_t complete_symmetric(float* h, int64_t k, cudaStream_t stream) {
  complete_kernel<<<tiles_of(k, k), dim3(kTile, kTileRows), 0, stream>>>(h, k);
  return cudaGetLastError();
}

cudaError_t take_diagonal(const float* h, int64_t k, float* out, cudaStream_t stream) {
  diagonal_kernel<<<blocks_of(k), kThreads, 0, stream>>>(h, k, out);
  return cudaGetLastError();
}

cudaError_t add_scaled(
    const float* from, double factor, int64_t count, float* to, cudaStream_t stream) {
  add_kernel<<<blocks_of(count), kThreads, 0, stream>>>(from, factor, count, to);
  return cudaGetLastError();
}

cudaError_t turn_columns(const TurnArgs& args, cudaStream_t stream) {
  if (args.stride % kTile != 0 || args.stride < args.rows) {
    return cudaErrorInvalidValue;
  }
  turn_kernel<<<tiles_of(args.k, args.stride), dim3(kTile, kTileRows), 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t turn_back_columns(const TurnArgs& args, cudaStream_t stream) {
  if (args.stride % kTile != 0 || args.stride < args.rows) {
    return cudaErrorInvalidValue;
  }
  turn_back_kernel<<<tiles_of(args.k, args.stride), dim3(kTile, kTileRows), 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t subtract(
    const float* a, const float* b, int64_t count, float* to, cudaStream_t stream) {
  subtract_kernel<<<blocks_of(count), kThreads, 0, stream>>>(a, b, count, to);
  return cudaGetLastError();
}

cudaError_t dot_parts(
    const float* a, const float* b, int64_t count, double* parts, cudaStream_t stream) {
  dot_kernel<<<kDotParts, kThreads, 0, stream>>>(a, b, count, parts);
  return cudaGetLastError();
}

}  // namespace nibble::cuda
