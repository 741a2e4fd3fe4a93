// What a blocked Cholesky factorization needs beside products: the block at the diagonal with its
// inverse, and the order of columns.

#include "backend/cuda/calibration/kernels.h"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWidth = 16;  // columns that its threads take side by side
constexpr int kBlock = static_cast<int>(kFactorBlock);
constexpr int kPitch = kBlock + 1;

struct FactorMemory {
  float l[kBlock * kPitch];
  float inverse[kBlock * kPitch];
  float roots[kBlock];
};

__device__ __forceinline__ void load_lower(const FactorBlockArgs& args, FactorMemory& memory) {
  for (int i = static_cast<int>(threadIdx.x); i < kBlock * kBlock; i += kThreads) {
    const int row = i / kBlock;
    const int column = i % kBlock;
    const bool inside = row < args.count && column <= row;
    memory.l[row * kPitch + column] = inside ? args.a[row * args.stride + column] : 0.0F;
    memory.inverse[row * kPitch + column] = 0.0F;
  }
}

/// Columns one after the other; each is taken off those behind it.
__device__ __forceinline__ void factor_columns(const FactorBlockArgs& args, FactorMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  const int count = static_cast<int>(args.count);
  for (int t = 0; t < count; ++t) {
    __syncthreads();
    const float pivot = memory.l[t * kPitch + t];
    const float root = sqrtf(pivot);
    const int below = t + 1 + thread;
    if (below < count) {
      memory.l[below * kPitch + t] /= root;
    }
    if (thread == 0) {
      memory.roots[t] = root;
      if (!(pivot > 0.0F) || isinf(pivot)) {
        *args.failed = 1;
      }
    }
    __syncthreads();
    for (int i = t + 1 + thread / kWidth; i < count; i += kThreads / kWidth) {
      const float factor = memory.l[i * kPitch + t];
      for (int j = t + 1 + thread % kWidth; j <= i; j += kWidth) {
        memory.l[i * kPitch + j] -= factor * memory.l[j * kPitch + t];
      }
    }
  }
  __syncthreads();
}

/// A thread for each column of the inverse.
__device__ __forceinline__ void invert(const FactorBlockArgs& args, FactorMemory& memory) {
  const int column = static_cast<int>(threadIdx.x);
  const int count = static_cast<int>(args.count);
  if (column < count) {
    memory.inverse[column * kPitch + column] = 1.0F / memory.roots[column];
    for (int i = column + 1; i < count; ++i) {
      float sum = 0.0F;
      for (int m = column; m < i; ++m) {
        sum += memory.l[i * kPitch + m] * memory.inverse[m * kPitch + column];
      }
      memory.inverse[i * kPitch + column] = -sum / memory.roots[i];
    }
  }
  __syncthreads();
}

__global__ __launch_bounds__(kThreads) void factor_kernel(FactorBlockArgs args) {
  args.a += int64_t{blockIdx.x} * args.batch_stride;
  args.inverse += int64_t{blockIdx.x} * kBlock * kBlock;
  args.failed += blockIdx.x;
  extern __shared__ float4 shared[];
  auto& memory = *reinterpret_cast<FactorMemory*>(shared);
  load_lower(args, memory);
  factor_columns(args, memory);
  invert(args, memory);
  for (int i = static_cast<int>(threadIdx.x); i < kBlock * kBlock; i += kThreads) {
    const int row = i / kBlock;
    const int column = i % kBlock;
    if (row < args.count) {
      args.inverse[i] = memory.inverse[row * kPitch + column];
      if (column <= row) {
        args.a[row * args.stride + column] =
            column == row ? memory.roots[row] : memory.l[row * kPitch + column];
      }
    }
  }
}

constexpr int kTile = 32;
constexpr int kTileRows = 8;

__global__ void reverse_sums_kernel(const ReversedSumsArgs args) {
  const int64_t j = int64_t{blockIdx.x} * kTile + threadIdx.x;
  const int64_t i = int64_t{blockIdx.y} * kTileRows + threadIdx.y;
  if (i >= args.k || j > i) {
    return;
  }
  const float sum =
      args.from[int64_t{args.order[args.k - 1 - i]} * args.k + args.order[args.k - 1 - j]];
  float out = sum;
  if (i == j) {
    const double alive = sum == 0.0F ? 1.0 : static_cast<double>(sum);
    out = static_cast<float>(fmax(alive, args.floor) + args.damping);
  }
  args.to[i * args.k + j] = out;
}

constexpr int kElementThreads = 256;

__global__ __launch_bounds__(kElementThreads) void reverse_kernel(float* a, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kElementThreads + threadIdx.x;
  if (i < count / 2) {
    const float first = a[i];
    a[i] = a[count - 1 - i];
    a[count - 1 - i] = first;
  }
}

}  // namespace

cudaError_t factor_block(const FactorBlockArgs& args, cudaStream_t stream) {
  if (args.count < 1 || args.count > kFactorBlock) {
    return cudaErrorInvalidValue;
  }
  const cudaError_t raised = cudaFuncSetAttribute(
      factor_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(FactorMemory));
  if (raised != cudaSuccess) {
    return raised;
  }
  factor_kernel<<<static_cast<unsigned>(args.batch), kThreads, sizeof(FactorMemory), stream>>>(
      args);
  return cudaGetLastError();
}

cudaError_t reverse_sums(const ReversedSumsArgs& args, cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>((args.k + kTile - 1) / kTile),
                    static_cast<unsigned>((args.k + kTileRows - 1) / kTileRows));
  reverse_sums_kernel<<<blocks, dim3(kTile, kTileRows), 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t reverse_in_place(float* a, int64_t count, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((count / 2 + kElementThreads - 1) / kElementThreads);
  if (blocks > 0) {
    reverse_kernel<<<blocks, kElementThreads, 0, stream>>>(a, count);
  }
  return cudaGetLastError();
}

}  // namespace nibble::cuda
