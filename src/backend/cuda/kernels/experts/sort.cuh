#pragma once

#include <cstdint>

#include "backend/cuda/expert_kernels.h"
#include "backend/cuda/kernels/experts/route.cuh"

// The slots of a step in the order of their experts, then of their rows, by one block.
namespace nibble::cuda {

constexpr int kSortThreads = 1024;
constexpr int kSortWarps = kSortThreads / kWarp;
constexpr size_t kSortBytes = size_t{40} << 10;  // of shared memory, for counts

/// Runs of neighbouring slots that are counted apart: a warp each, as many as counts find room for.
[[nodiscard]] __host__ __device__ constexpr int sort_runs(int experts) {
  const auto fit = static_cast<int>(kSortBytes / (2 * static_cast<size_t>(experts)));
  return fit < kSortWarps ? fit : kSortWarps;
}

/// sums[i] = numbers[0] + ... + numbers[i], one number per thread of the block.
__device__ inline int inclusive_sum(int value, int* of_warps) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int warp = static_cast<int>(threadIdx.x / kWarp);
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int other = __shfl_up_sync(kWarpLanes, value, distance);
    value += lane >= distance ? other : 0;
  }
  if (lane == kWarp - 1) {
    of_warps[warp] = value;
  }
  __syncthreads();
  const int own = lane < warp ? of_warps[lane] : 0;
  const int before = __reduce_add_sync(kWarpLanes, own);
  __syncthreads();
  return value + before;
}

/// visit(slot, expert, rank) for the slots of this warp's run, 32 at a time: `rank` among those of
/// one expert; then count(expert, of them). An expert's slots come in their order.
template <typename Visit>
__device__ __forceinline__ void walk_run(
    const SortSlotsArgs& args, int slots, int run, int runs, uint16_t* counts, const Visit& visit) {
  constexpr int kAtOnce = 8;  // loads under way
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int each = ((slots + runs - 1) / runs + kWarp - 1) / kWarp * kWarp;
  const int end = min(slots, (run + 1) * each);
  for (int base = run * each; base < end; base += kAtOnce * kWarp) {
    int experts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int slot = base + i * kWarp + lane;
      experts[i] = slot < end ? args.chosen[slot] : -1;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (base + i * kWarp >= end) {
        break;
      }
      const int expert = experts[i];
      const unsigned peers = __match_any_sync(kWarpLanes, expert);
      const int rank = __popc(peers & ((1U << lane) - 1));
      const int before = expert >= 0 ? counts[expert] : 0;
      if (expert >= 0) {
        visit(base + i * kWarp + lane, expert, before + rank);
      }
      __syncwarp();
      if (expert >= 0 && rank == 0) {
        counts[expert] = static_cast<uint16_t>(before + __popc(peers));
      }
      __syncwarp();
    }
  }
}

/// Lists the tiles of this thread's expert, and all that are none.
__device__ inline void list_tiles(const SortSlotsArgs& args, int count, int first, int* of_warps) {
  const int expert = static_cast<int>(threadIdx.x);
  const int tiles = (count + args.tile_rows - 1) / args.tile_rows;
  const int end = inclusive_sum(tiles, of_warps);
  for (int i = 0; i < tiles; ++i) {
    const int rows = count - i * args.tile_rows;
    args.tiles[end - tiles + i] = {expert, first + i * args.tile_rows, min(rows, args.tile_rows)};
  }
  __shared__ int all;
  if (expert == kSortThreads - 1) {
    all = end;
    *args.tile_count = end;
  }
  __syncthreads();
  for (int64_t i = all + expert; i < args.max_tiles; i += kSortThreads) {
    args.tiles[i] = {0, 0, 0};
  }
}

/// A thread has an expert; a warp has a run of slots. counts: [runs, experts].
__device__ inline void sort_block(const SortSlotsArgs& args, uint16_t* counts) {
  __shared__ int firsts[kMostExperts];
  __shared__ int of_warps[kSortWarps];
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  const auto slots = static_cast<int>(args.rows * args.top_k);
  const int runs = sort_runs(args.experts);
  for (int i = thread; i < runs * args.experts; i += kSortThreads) {
    counts[i] = 0;
  }
  __syncthreads();
  uint16_t* own = counts + warp * args.experts;
  if (warp < runs) {
    walk_run(args, slots, warp, runs, own, [](int, int, int) {});
  }
  __syncthreads();
  int count = 0;
  if (thread < args.experts) {
    for (int run = 0; run < runs; ++run) {  // what comes before it
      uint16_t* of_run = counts + run * args.experts + thread;
      const int here = *of_run;
      *of_run = static_cast<uint16_t>(count);
      count += here;
    }
  }
  const int first = inclusive_sum(count, of_warps) - count;
  firsts[thread] = first;
  list_tiles(args, count, first, of_warps);
  __syncthreads();
  if (warp < runs) {
    walk_run(args, slots, warp, runs, own,
             [&](int slot, int expert, int at) { args.slot_of[slot] = firsts[expert] + at; });
  }
}

/// sort_block() of at most 32 slots, by one warp.
__device__ inline void sort_warp(const SortSlotsArgs& args) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const auto slots = static_cast<int>(args.rows * args.top_k);
  const int expert = lane < slots ? args.chosen[lane] : kMostExperts;
  const unsigned peers = __match_any_sync(kWarpLanes, expert);
  const int rank = __popc(peers & ((1U << lane) - 1));
  const int count = __popc(peers);
  const int own_tiles =
      lane < slots && rank == 0 ? (count + args.tile_rows - 1) / args.tile_rows : 0;
  int first = 0, tile = 0;  // slots and tiles of lower experts
  for (int other = 0; other < slots; ++other) {
    const int of_other = __shfl_sync(kWarpLanes, expert, other);
    const int tiles = __shfl_sync(kWarpLanes, own_tiles, other);
    first += of_other < expert ? 1 : 0;
    tile += of_other < expert ? tiles : 0;
  }
  if (lane < slots) {
    args.slot_of[lane] = first + rank;
  }
  for (int i = 0; i < own_tiles; ++i) {
    args.tiles[tile + i] = {expert, first + i * args.tile_rows,
                            min(count - i * args.tile_rows, args.tile_rows)};
  }
  const int all = __reduce_add_sync(kWarpLanes, own_tiles);
  for (int64_t i = all + lane; i < args.max_tiles; i += kWarp) {
    args.tiles[i] = {0, 0, 0};
  }
  if (lane == 0) {
    *args.tile_count = all;
  }
}

}  // namespace nibble::cuda
