// The slots of a step's experts: the rows in their order, and the sum over a row's slots.

#include "backend/cuda/expert_kernels.h"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kCopyThreads = 128;
constexpr int kCombineThreads = 256;
constexpr int64_t kManyRows = 1024;  // blocks enough without sharing a row

__global__ __launch_bounds__(kCopyThreads) void number_kernel(const NumberSlotsArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t i = int64_t{blockIdx.x} * kCopyThreads + threadIdx.x;
  if (i < args.rows * args.top_k) {
    if (const int expert = args.chosen[i]; expert >= 0) {
      args.slot_of[i] = static_cast<int32_t>(expert * args.rows + i / args.top_k);
    }
  }
}

/// A block has a row, which is read once.
__global__ __launch_bounds__(kCopyThreads) void scatter_kernel(const ScatterRowsArgs args) {
  __shared__ int slots[kCopyThreads];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < args.top_k) {
    const int slot = args.slot_of[row * args.top_k + thread];
    slots[thread] = slot;
  }
  __syncthreads();
  if (blockIdx.y == 0) {
    for (int64_t i = thread; i < args.top_k * args.row_scales; i += kCopyThreads) {
      const int64_t number = i % args.row_scales;
      if (const int slot = slots[i / args.row_scales]; slot != kNoSlot) {
        const bool below = args.scale_stride > 0;  // each other
        args.slot_scales[below ? number * args.slot_scale_stride + slot
                               : slot * args.row_scales + number] =
            args.scales[below ? number * args.scale_stride + row : row * args.row_scales + number];
      }
    }
  }
  const int64_t words = args.row_bytes / 16;
  const auto* from = static_cast<const uint4*>(args.from) + row * words;
  auto* to = static_cast<uint4*>(args.to);
  for (int64_t i = int64_t{blockIdx.y} * kCopyThreads + thread; i < words;
       i += int64_t{gridDim.y} * kCopyThreads) {
    const uint4 word = from[i];
    for (int c = 0; c < args.top_k; ++c) {
      if (slots[c] != kNoSlot) {
        to[slots[c] * words + i] = word;
      }
    }
  }
}

__device__ __forceinline__ float4 four_of(const float4& word) { return word; }
__device__ __forceinline__ float4 four_of(const uint2& word) {
  return {__uint_as_float(word.x << 16), __uint_as_float(word.x & 0xffff0000U),
          __uint_as_float(word.y << 16), __uint_as_float(word.y & 0xffff0000U)};
}

/// A thread has four columns of a row at a time, of as many slots as it reads at once. Word: four
/// results.
template <typename Word>
__global__ __launch_bounds__(kCombineThreads) void combine_kernel(const CombineSlotsArgs args) {
  constexpr int kAtOnce = 4;
  __shared__ const Word* slots[kCombineThreads];
  __shared__ float weights[kCombineThreads];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = blockIdx.x;
  const auto thread = static_cast<int>(threadIdx.x);
  const int64_t words = args.n / 4;
  if (thread < args.top_k) {
    const int64_t slot = args.slot_of[row * args.top_k + thread];
    slots[thread] =
        slot == kNoSlot ? nullptr : static_cast<const Word*>(args.results) + slot * words;
    weights[thread] = args.weights[row * args.top_k + thread];
  }
  __syncthreads();
  auto* y = reinterpret_cast<float4*>(args.y + row * args.y_stride);
  for (int64_t i = int64_t{blockIdx.y} * kCombineThreads + thread; i < words;
       i += int64_t{gridDim.y} * kCombineThreads) {
    float4 sum = y[i];
    for (int first = 0; first < args.top_k; first += kAtOnce) {
      float4 x[kAtOnce];
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const Word* of = first + c < args.top_k ? slots[first + c] : nullptr;
        x[c] = of != nullptr ? four_of(__ldcs(of + i)) : float4{};
      }
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        if (first + c < args.top_k && slots[first + c] != nullptr) {
          const float weight = weights[first + c];
          sum.x = __fadd_rn(sum.x, __fmul_rn(x[c].x, weight));
          sum.y = __fadd_rn(sum.y, __fmul_rn(x[c].y, weight));
          sum.z = __fadd_rn(sum.z, __fmul_rn(x[c].z, weight));
          sum.w = __fadd_rn(sum.w, __fmul_rn(x[c].w, weight));
        }
      }
    }
    if (args.beside != nullptr) {
      const float4 last = reinterpret_cast<const float4*>(args.beside + row * args.n)[i];
      sum.x = __fadd_rn(sum.x, last.x);
      sum.y = __fadd_rn(sum.y, last.y);
      sum.z = __fadd_rn(sum.z, last.z);
      sum.w = __fadd_rn(sum.w, last.w);
    }
    y[i] = sum;
  }
}

}  // namespace

cudaError_t number_slots(const NumberSlotsArgs& args, const LaunchContext& context) {
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const int64_t blocks = (args.rows * args.top_k + kCopyThreads - 1) / kCopyThreads;
  const Grid grid{.blocks = dim3(static_cast<unsigned>(blocks)), .threads = kCopyThreads};
  return launch(number_kernel, grid, context, args);
}

cudaError_t scatter_rows(const ScatterRowsArgs& args, const LaunchContext& context) {
  if (args.row_bytes % 16 != 0 || args.rows > INT32_MAX || args.top_k > kCopyThreads ||
      (args.scale_stride > 0) != (args.slot_scale_stride > 0)) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const int64_t parts =
      args.rows >= kManyRows ? 1 : (args.row_bytes / 16 + kCopyThreads - 1) / kCopyThreads;
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows), static_cast<unsigned>(parts)),
                  .threads = kCopyThreads};
  return launch(scatter_kernel, grid, context, args);
}

cudaError_t combine_slots(const CombineSlotsArgs& args, const LaunchContext& context) {
  if (args.n % 4 != 0 || args.y_stride % 4 != 0 || args.rows > INT32_MAX ||
      args.top_k > kCombineThreads || (args.type != DType::kF32 && args.type != DType::kBF16)) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const int64_t columns =
      args.rows >= kManyRows ? 1 : (args.n / 4 + kCombineThreads - 1) / kCombineThreads;
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows), static_cast<unsigned>(columns)),
                  .threads = kCombineThreads};
  return args.type == DType::kBF16 ? launch(combine_kernel<uint2>, grid, context, args)
                                   : launch(combine_kernel<float4>, grid, context, args);
}

}  // namespace nibble::cuda
