// The slots of a step's experts: their order, the rows in it, and the sum over a row's slots.

#include "backend/cuda/expert_kernels.h"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kSortThreads = 1024;
constexpr int kWarp = 32;
constexpr int kMostExperts = 1024;
constexpr int kCopyThreads = 128;
constexpr int kCombineThreads = 256;
constexpr unsigned kAllLanes = 0xffffffffU;

/// sums[i] = numbers[0] + ... + numbers[i], one number per thread of the block.
__device__ int inclusive_sum(int value, int* of_warps) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, value, distance);
    value += lane >= distance ? other : 0;
  }
  if (lane == kWarp - 1) {
    of_warps[warp] = value;
  }
  __syncthreads();
  int before = 0;
  for (int w = 0; w < warp; ++w) {
    before += of_warps[w];
  }
  __syncthreads();
  return value + before;
}

/// One block. A thread has an expert; then a warp has every 32nd expert and walks all slots, so
/// that an expert's slots keep the order of rows.
__global__ __launch_bounds__(kSortThreads) void sort_kernel(const SortSlotsArgs args) {
  __shared__ int counts[kMostExperts];
  __shared__ int firsts[kMostExperts];
  __shared__ int of_warps[kSortThreads / kWarp];
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int thread = threadIdx.x;
  const auto slots = static_cast<int>(args.rows * args.top_k);
  counts[thread] = 0;
  __syncthreads();
  for (int slot = thread; slot < slots; slot += kSortThreads) {
    atomicAdd(counts + args.chosen[slot], 1);
  }
  __syncthreads();
  const int count = counts[thread];
  const int first = inclusive_sum(count, of_warps) - count;
  firsts[thread] = first;
  const int tiles = (count + args.tile_rows - 1) / args.tile_rows;
  const int end_tile = inclusive_sum(tiles, of_warps);
  for (int i = 0; i < tiles; ++i) {
    const int rows = count - i * args.tile_rows;
    args.tiles[end_tile - tiles + i] = {thread, first + i * args.tile_rows,
                                        rows < args.tile_rows ? rows : args.tile_rows};
  }
  __shared__ int all_tiles;
  if (thread == kSortThreads - 1) {
    all_tiles = end_tile;
  }
  __syncthreads();
  for (int64_t i = all_tiles + thread; i < args.max_tiles; i += kSortThreads) {
    args.tiles[i] = {0, 0, 0};
  }
  const int lane = thread % kWarp;
  for (int expert = thread / kWarp; expert < args.experts; expert += kSortThreads / kWarp) {
    int next = firsts[expert];
    for (int base = 0; base < slots && counts[expert] > 0; base += kWarp) {
      const int slot = base + lane;
      const bool own = slot < slots && args.chosen[slot] == expert;
      const unsigned owners = __ballot_sync(kAllLanes, own);
      if (own) {
        const int at = next + __popc(owners & ((1U << lane) - 1));
        args.slot_of[slot] = at;
        args.row_of[at] = slot / args.top_k;
      }
      next += __popc(owners);
    }
  }
}

__global__ __launch_bounds__(kCopyThreads) void gather_kernel(const GatherSlotsArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t slot = blockIdx.x;
  const int64_t row = args.row_of[slot];
  const auto* from =
      reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(args.from) + row * args.row_bytes);
  auto* to = reinterpret_cast<uint4*>(static_cast<uint8_t*>(args.to) + slot * args.row_bytes);
  for (int64_t i = threadIdx.x; i < args.row_bytes / 16; i += kCopyThreads) {
    to[i] = from[i];
  }
  for (int64_t i = threadIdx.x; i < args.row_scales; i += kCopyThreads) {
    args.slot_scales[slot * args.row_scales + i] = args.scales[row * args.row_scales + i];
  }
}

/// Four columns of a row per thread.
__global__ __launch_bounds__(kCombineThreads) void combine_kernel(const CombineSlotsArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = blockIdx.x;
  const int64_t i = (int64_t{blockIdx.y} * kCombineThreads + threadIdx.x) * 4;
  if (i >= args.n) {
    return;
  }
  auto* y = reinterpret_cast<float4*>(args.y + row * args.y_stride + i);
  float4 sum = *y;
  for (int c = 0; c < args.top_k; ++c) {
    const int64_t slot = args.slot_of[row * args.top_k + c];
    const float weight = args.weights[row * args.top_k + c];
    const float4 x = *reinterpret_cast<const float4*>(args.results + slot * args.n + i);
    sum.x = __fadd_rn(sum.x, __fmul_rn(x.x, weight));
    sum.y = __fadd_rn(sum.y, __fmul_rn(x.y, weight));
    sum.z = __fadd_rn(sum.z, __fmul_rn(x.z, weight));
    sum.w = __fadd_rn(sum.w, __fmul_rn(x.w, weight));
  }
  *y = sum;
}

}  // namespace

cudaError_t sort_slots(const SortSlotsArgs& args, const LaunchContext& context) {
  if (args.experts < 1 || args.experts > kMostExperts || args.rows * args.top_k > INT32_MAX ||
      args.tile_rows < 1) {
    return cudaErrorInvalidValue;
  }
  return launch(sort_kernel, {.blocks = dim3(1), .threads = kSortThreads}, context, args);
}

cudaError_t gather_slots(const GatherSlotsArgs& args, const LaunchContext& context) {
  if (args.row_bytes % 16 != 0 || args.slots > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (args.slots == 0) {
    return cudaSuccess;
  }
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.slots)), .threads = kCopyThreads};
  return launch(gather_kernel, grid, context, args);
}

cudaError_t combine_slots(const CombineSlotsArgs& args, const LaunchContext& context) {
  if (args.n % 4 != 0 || args.y_stride % 4 != 0 || args.rows > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const int64_t columns = (args.n / 4 + kCombineThreads - 1) / kCombineThreads;
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows), static_cast<unsigned>(columns)),
                  .threads = kCombineThreads};
  return launch(combine_kernel, grid, context, args);
}

}  // namespace nibble::cuda
