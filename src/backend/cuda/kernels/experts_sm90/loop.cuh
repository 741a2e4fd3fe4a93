#pragma once

#include <cstdint>

#include "backend/cuda/kernels/experts_sm90/items.cuh"
#include "backend/cuda/kernels/experts_sm90/store.cuh"
#include "backend/cuda/kernels/w4a16_sm90/w4a16_sm90.cuh"

// The products of all experts of a layer in one launch: the blocks of a grid as large as the GPU
// take the items of a list (rows of one expert x some of its channels) in turn. The list is made on
// the device; the main loop is that of w4a16_sm90/w4a16_sm90.cuh, and the ring of stages runs on
// from item to item.
namespace nibble::cuda {

/// Items of kCluster x kGroups x kBlocks x 64 channels and kTokens rows, of which a cluster's
/// blocks have kGroups x kBlocks x 64 channels each: what a block copies of x goes to all. Items of
/// fewer rows are multiplied in fewer tokens, by kStep.
template <int kTokens_, int kBlocks_, int kGroups_, int kStages_, int kCluster_ = 1>
struct ExpertsTile : W4A16Tile<kTokens_, kBlocks_, kGroups_, kStages_, 1, 1, kCluster_> {
  static constexpr int kItemBlocks = kCluster_ * kGroups_ * kBlocks_;
  // Rows and panels of 64 of K that one copy brings: where not all rows are wanted, fewer of them;
  // the copying thread is slow.
  static constexpr int kBox = kTokens_ < 128 ? kTokens_ : kTokens_ % 64 == 0 ? 64 : 32;
  static constexpr int kPanels = kBox == kTokens_ ? 2 : 1;
  static constexpr int kStep = kTokens_ == 256                     ? 64
                               : kTokens_ == 64 || kTokens_ == 160 ? 32
                                                                   : kTokens_;
};

template <typename Codec, typename Tile>
struct ExpertsLoop {
  using Loop = W4A16Loop<Codec, Tile>;
  using Layout = typename Codec::Layout;
  using Place = typename Loop::Place;
  static constexpr int kTokens = Tile::kTokens, kBlocks = Tile::kBlocks, kStages = Tile::kStages;
  static constexpr int kBytes = Loop::kBytes;
  // Tokens that products of an item are made of: the least, and more in steps as its rows need
  // them. In other tiles ptxas finds no registers for two loops, in these for no more than three.
  static constexpr int kStep = Tile::kStep;
  static constexpr int kLeast = kTokens - (kTokens > 64 ? 2 : 1) * (kStep % kTokens);

  using Items = ExpertItems<Tile>;
  using Item = ExpertItem;

  // --- the copying warp, one thread of it ---

  // Tokens that products of so many rows are made of.
  static __device__ __forceinline__ int tokens_of(int rows) {
    return max(kLeast, (rows + kStep - 1) / kStep * kStep);
  }

  static __device__ __forceinline__ int rank() {
    return Tile::kCluster == 1 ? 0 : static_cast<int>(blockIdx.x) % Tile::kCluster;
  }
  static __device__ __forceinline__ int first_item() {
    return static_cast<int>(blockIdx.x) / Tile::kCluster;
  }
  static __device__ __forceinline__ int item_step() {
    return static_cast<int>(gridDim.x) / Tile::kCluster;
  }

  static __device__ __forceinline__ void copy_stage(const CUtensorMap& x,
                                                    const ExpertsSm90Args& args,
                                                    const Item& item,
                                                    int step,
                                                    uint32_t stage,
                                                    uint32_t barrier) {
    constexpr int kBoxBytes = Tile::kBox * 128;  // of a panel
    const int block = item.block + rank() * Tile::kRowBlocks;
    const int blocks = max(0, min(Tile::kRowBlocks, args.row_blocks - block));
    const int boxes =
        Tile::kPanels == 2 ? 1 : (tokens_of(item.tile.rows) + Tile::kBox - 1) / Tile::kBox;
    ptx::barrier_arrive_expect(barrier, blocks * Layout::kPairBytes + boxes * 2 * kBoxBytes);
    const uint8_t* weights = args.weights + item.tile.expert * args.expert_bytes +
                             (static_cast<int64_t>(block) * args.pairs + step) * Layout::kPairBytes;
    for (int b = 0; b < blocks; ++b) {
      ptx::bulk_copy(stage + b * Layout::kPairBytes, weights, Layout::kPairBytes, barrier);
      weights += static_cast<int64_t>(args.pairs) * Layout::kPairBytes;
    }
    for (int box = rank(); box < boxes; box += Tile::kCluster) {
      const int row = item.tile.first * args.x_step + box * Tile::kBox;
#pragma unroll
      for (int d = 0; d < 2; d += Tile::kPanels) {
        const uint32_t to = stage + Loop::kX + d * Loop::kXBytes + box * kBoxBytes;
        if constexpr (Tile::kCluster == 1) {
          ptx::tensor_copy(to, x, 0, row, 2 * step + d, barrier);
        } else {
          ptx::tensor_copy_to_all(to, x, 0, row, 2 * step + d, barrier, (1 << Tile::kCluster) - 1);
        }
      }
    }
  }

  static __device__ __forceinline__ void fill_ring(const CUtensorMap& x,
                                                   const ExpertsSm90Args& args,
                                                   uint32_t base) {
    if constexpr (Tile::kCluster > 1) {
      ptx::cluster_wait();  // all have their barriers
    }
    wait_for_rows(args);
    Items items(args, first_item(), item_step());
    Item item;
    Place place(base);
    int count = 0;
    while (items.next(item)) {
      for (int step = 0; step < args.pairs; ++step, ++count) {
        if (count >= kStages) {
          ptx::barrier_wait_to_refill(place.barrier + 8 * kStages, place.parity ^ 1);
        }
        copy_stage(x, args, item, step, base + place.offset, place.barrier);
        place.advance(base);
      }
    }
  }

  // --- the multiplying warpgroups ---

  // The products of an item of up to kCount rows, from the next stages on.
  template <int kCount>
  static __device__ __forceinline__ void multiply_rows(const ExpertsSm90Args& args,
                                                       const Item& item,
                                                       const typename Loop::Reader& reader,
                                                       Place& place,
                                                       int group,
                                                       uint32_t base) {
    const int thread = static_cast<int>(threadIdx.x & 127);
    float sums[kBlocks][kCount / 2] = {};
    Loop::template accumulate<kBlocks, kCount>(sums, place, Loop::uniform(args.pairs), reader,
                                               base);
    Loop::restore(sums);
    store_item(sums, args, item.tile, item.block + rank() * Tile::kRowBlocks + group * kBlocks,
               group, thread, base + Loop::kStaged + group * kStagedBytes);
  }

  // The same, of as many tokens as the rows need, which are at least kCount.
  template <int kCount = kLeast>
  static __device__ __forceinline__ void multiply_item(const ExpertsSm90Args& args,
                                                       const Item& item,
                                                       const typename Loop::Reader& reader,
                                                       Place& place,
                                                       int group,
                                                       uint32_t base) {
    if constexpr (kCount < kTokens) {
      if (Loop::uniform(tokens_of(item.tile.rows)) > kCount) {
        return multiply_item<kCount + kStep>(args, item, reader, place, group, base);
      }
    }
    multiply_rows<kCount>(args, item, reader, place, group, base);
  }

  static __device__ __forceinline__ void multiply_items(const ExpertsSm90Args& args,
                                                        int group,
                                                        uint32_t base) {
    if constexpr (Tile::kCluster > 1) {
      ptx::cluster_wait();
    }
    wait_for_rows(args);
    ptx::allow_successor();
    Items items(args, first_item(), item_step());
    Item item;
    Place place(base);
    const typename Loop::Reader reader(base, group, static_cast<int>(threadIdx.x & 127));
    while (items.next(item)) {
      multiply_item(args, item, reader, place, group, base);
    }
    wait_for_neighbour(args);
  }
};

/// y of all items. x [slots, k] bf16 in boxes of 64 x kBox.
template <typename Codec, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_experts_sm90(const __grid_constant__ CUtensorMap x,
                      const __grid_constant__ ExpertsSm90Args args) {
  using Experts = ExpertsLoop<Codec, Tile>;
  using Loop = typename Experts::Loop;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const int warp = Loop::uniform(static_cast<int>(threadIdx.x >> 5));
  if (threadIdx.x == 128 * Tile::kGroups) {
    ptx::prefetch_tensor_map(x);
    ptx::init_ring<Tile::kStages>(base + Loop::kBarriers,
                                  4 * Tile::kGroups * Tile::kCluster * ptx::kWarpArrivals);
    ptx::barrier_init_fence();
  }
  ptx::announce_barriers<Tile::kCluster>();
  if (warp >= 4 * Tile::kGroups) {
    ptx::registers_release<Tile::kLeft>();
    if (threadIdx.x == 128 * Tile::kGroups) {
      Experts::fill_ring(x, args, base);
    } else if constexpr (Tile::kCluster > 1) {
      ptx::cluster_wait();
    }
  } else {
    ptx::registers_take<Tile::kTaken>();
    Experts::multiply_items(args, warp >> 2, base);
  }
  if constexpr (Tile::kCluster > 1) {
    ptx::cluster_sync();  // the other may still arrive at this block's barriers
  }
}

}  // namespace nibble::cuda
