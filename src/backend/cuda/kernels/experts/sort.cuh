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
/// one expert; then count(expert, of them). An expert's slots come in their order. Those without an
/// expert are passed over.
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

/// A slot's place in the new order.
__device__ __forceinline__ void place_slot(const SortSlotsArgs& args,
                                           int slot,
                                           int expert,
                                           int place) {
  args.slot_of[slot] = place;
  if (args.expert_of != nullptr) {
    args.expert_of[place] = expert;
  }
}

/// How an expert's rows are cut into tiles.
struct ExpertCut {
  int count, step;
  int tiles = 0;
  int steps = 0;     // of all tiles
  bool few = false;  // a tile of the second list

  __device__ __forceinline__ ExpertCut(const TileRows& cut, int rows)
      : count(rows), step(cut.step) {
    few = count > 0 && count <= cut.few;
    tiles = few ? 1 : (count + cut.most - 1) / cut.most;
    steps = (count + step - 1) / step;
  }
  /// Steps of the largest tile.
  [[nodiscard]] __device__ __forceinline__ int most() const {
    return tiles <= 1 ? steps : (steps + tiles - 1) / tiles;
  }
  /// Writes the tiles of an expert whose slots begin at `first`.
  __device__ __forceinline__ void list(ExpertTile* to, int expert, int first) const {
    if (tiles == 1) {
      to[0] = {expert, first, count};
      return;
    }
    const int each = tiles == 0 ? 0 : steps / tiles, longer = steps - each * tiles;
    for (int i = 0, begin = 0; i < tiles; ++i) {
      const int end = min(count, begin + (each + (i < longer ? 1 : 0)) * step);
      to[i] = {expert, first + begin, end - begin};
      begin = end;
    }
  }
};

/// Lists the tiles of this thread's expert where they are of the list `few` says, and all of it
/// that are none.
__device__ inline void list_tiles(
    const SortSlotsArgs& args, const ExpertCut& cut, int first, bool few, int* of_warps) {
  const int expert = static_cast<int>(threadIdx.x);
  ExpertTile* list = args.tiles + (few ? args.max_tiles : 0);
  int before = 0;  // tiles of more steps
  for (int steps = few ? 1 : args.cut.most / args.cut.step; steps > 0; --steps) {
    const bool mine = cut.few == few && (few || cut.most() == steps);
    const int tiles = mine ? cut.tiles : 0;
    const int end = before + inclusive_sum(tiles, of_warps);
    if (mine) {
      cut.list(list + end - tiles, expert, first);
    }
    __shared__ int all;
    if (expert == kSortThreads - 1) {
      all = end;
    }
    __syncthreads();
    before = all;
  }
  if (expert == 0) {
    args.tile_count[few ? 1 : 0] = before;
  }
  for (int64_t i = before + expert; i < args.max_tiles; i += kSortThreads) {
    list[i] = {0, 0, 0};
  }
}

/// Adds a run of a layer: by one thread. Layers follow each other on one stream, and an addition
/// whose result nobody asks for is not waited for.
__device__ inline void add_counts(const SortSlotsArgs& args, int active, int slots, int rows_max) {
  if (args.slot_count != nullptr) {
    *args.slot_count = slots;
  }
  if (args.counts == nullptr) {
    return;
  }
  const auto add = [](int64_t* sum, int64_t number) {
    atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(number));
  };
  add(&args.counts->runs, 1);
  add(&args.counts->active, active);
  add(&args.counts->slots, slots);
  add(&args.counts->rows_max, rows_max);
}

/// A thread has an expert; a warp has a run of slots. counts: [runs, experts].
__device__ inline void sort_block(const SortSlotsArgs& args, uint16_t* counts) {
  __shared__ int firsts[kMostExperts];
  __shared__ int of_warps[kSortWarps];
  __shared__ int active, rows_max;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp;
  const auto slots = static_cast<int>(args.rows * args.top_k);
  const int runs = sort_runs(args.experts);
  for (int i = thread; i < runs * args.experts; i += kSortThreads) {
    counts[i] = 0;
  }
  if (thread == 0) {
    active = rows_max = 0;
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
  const int active_of_warp = __popc(__ballot_sync(kWarpLanes, count > 0));
  const int max_of_warp = __reduce_max_sync(kWarpLanes, count);
  if (thread % kWarp == 0 && active_of_warp > 0) {
    atomicAdd(&active, active_of_warp);
    atomicMax(&rows_max, max_of_warp);
  }
  const ExpertCut cut(args.cut, count);
  list_tiles(args, cut, first, false, of_warps);
  if (args.cut.few > 0) {
    list_tiles(args, cut, first, true, of_warps);
  }
  __syncthreads();
  if (thread == kSortThreads - 1) {
    add_counts(args, active, first + count, rows_max);
  }
  if (warp < runs) {
    walk_run(args, slots, warp, runs, own, [&](int slot, int expert, int at) {
      place_slot(args, slot, expert, firsts[expert] + at);
    });
  }
}

/// sort_block() of at most 32 slots, by one warp.
__device__ inline void sort_warp(const SortSlotsArgs& args) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const auto slots = static_cast<int>(args.rows * args.top_k);
  const int number = lane < slots ? args.chosen[lane] : -1;
  const bool present = number >= 0;
  const int expert = present ? number : kMostExperts;
  const unsigned peers = __match_any_sync(kWarpLanes, expert);
  const int rank = __popc(peers & ((1U << lane) - 1));
  const int count = __popc(peers);
  const ExpertCut cut(args.cut, present && rank == 0 ? count : 0);
  // Of a list in each half of a word. So few rows are in the order of their experts alone.
  const int own_tiles = cut.few ? cut.tiles << 16 : cut.tiles;
  int first = 0, tile = 0;  // slots and tiles of lower experts
  for (int other = 0; other < slots; ++other) {
    const int of_other = __shfl_sync(kWarpLanes, expert, other);
    const int tiles = __shfl_sync(kWarpLanes, own_tiles, other);
    first += of_other < expert ? 1 : 0;
    tile += of_other < expert ? tiles : 0;
  }
  if (present) {
    place_slot(args, lane, expert, first + rank);
  }
  cut.list(args.tiles + (cut.few ? args.max_tiles + (tile >> 16) : tile & 0xffff), expert, first);
  const int all = __reduce_add_sync(kWarpLanes, own_tiles);
  for (int list = 0; list < (args.cut.few > 0 ? 2 : 1); ++list) {
    const int listed = list == 0 ? all & 0xffff : all >> 16;
    for (int64_t i = listed + lane; i < args.max_tiles; i += kWarp) {
      args.tiles[list * args.max_tiles + i] = {0, 0, 0};
    }
    if (lane == list) {
      args.tile_count[list] = listed;
    }
  }
  const int active = __popc(__ballot_sync(kWarpLanes, present && rank == 0));
  const int of_experts = __popc(__ballot_sync(kWarpLanes, present));
  const int rows_max = __reduce_max_sync(kWarpLanes, present ? count : 0);
  if (lane == 0) {
    add_counts(args, active, of_experts, rows_max);
  }
}

}  // namespace nibble::cuda
