#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/gemm_sm90.cuh"
#include "backend/cuda/kernels/gemm_sm90/turns.cuh"

// The products of all experts of a layer in one launch, with the main loop and the packed weights
// of gemm_sm90/gemm_sm90.cuh: the blocks of a grid as large as the GPU take the items of a list
// (rows of one expert x some of its channels) in turn. The list is made on the device, and the ring
// of stages runs on from item to item. What lies behind a tile's rows in a stage, rows of other
// experts or of an earlier step, makes up columns of sums that are not stored.
namespace nibble::cuda {

/// A GemmTile for items of kItemBlocks x 64 channels, kRowBlocks of them for each block of a
/// cluster. One copy brings kBox rows of x, and no more copies are made than rows take.
template <int kTokens_, int kBlocks_, int kDepth_, int kStages_, int kResident_, int kCluster_ = 1>
struct GroupedTile : GemmTile<kTokens_, kBlocks_, kDepth_, kStages_, kResident_, kCluster_> {
  static constexpr int kItemBlocks = kCluster_ * GroupedTile::kRowBlocks;
  static constexpr int kBox = kTokens_ == 160   ? 32
                              : kTokens_ >= 128 ? 64
                              : kTokens_ == 96  ? 48
                                                : kTokens_;
  // Of the tokens in which items of fewer rows are multiplied.
  static constexpr int kStep = kTokens_ == 256 ? 64 : kTokens_ == 160 ? 32 : kTokens_;
  static constexpr bool kOfExperts = true;
};

/// The same tile, of which kTokens_ tokens are multiplied and stored.
template <typename Tile, int kTokens_>
struct TokensOf : Tile {
  static constexpr int kTokens = kTokens_;
};

template <typename Codec, typename Tile>
struct GroupedLoop {
  using Shared = GemmShared<Codec, Tile>;
  using Place = RingPlace<Tile::kStages>;
  static constexpr int kTokens = Tile::kTokens;
  // Tokens that products of an item are made of: the least, and more in steps as its rows need
  // them.
  static constexpr int kStep = Tile::kStep;
  static constexpr int kLeast = kTokens - 2 * (kStep % kTokens);

  /// The items of this block's cluster, in turn. L1 may hold an older list.
  struct Items {
    const GroupedSm90Args& args;
    int chunks, count;
    ItemTurns turns;

    __device__ __forceinline__ explicit Items(const GroupedSm90Args& args_of)
        : args(args_of),
          chunks((args_of.row_blocks + Tile::kItemBlocks - 1) / Tile::kItemBlocks),
          count(__ldcg(args_of.tile_count) * chunks),
          turns(static_cast<int>(blockIdx.x) / Tile::kCluster,
                static_cast<int>(gridDim.x) / Tile::kCluster) {}
    [[nodiscard]] __device__ __forceinline__ bool more() const { return turns.index() < count; }
    __device__ __forceinline__ void advance() { turns.advance(); }
  };

  /// One of them; row_tile is this block's part, of kRowBlocks.
  struct Item {
    ExpertTile tile;
    int row_tile = 0;

    Item() = default;
    __device__ __forceinline__ explicit Item(const Items& items) {
      const int number = items.turns.index() / items.chunks;
      const auto* words = reinterpret_cast<const int32_t*>(items.args.tiles + number);
      tile = {__ldcg(words), __ldcg(words + 1), __ldcg(words + 2)};
      row_tile = (items.turns.index() - number * items.chunks) * Tile::kCluster + rank();
    }
  };

  static __device__ __forceinline__ int rank() {
    return Tile::kCluster == 1 ? 0 : static_cast<int>(blockIdx.x) % Tile::kCluster;
  }

  // --- the copying warp, one thread of it ---

  static __device__ __forceinline__ void copy_stage(const CUtensorMap& x,
                                                    const GroupedSm90Args& args,
                                                    const Item& item,
                                                    int step,
                                                    uint32_t stage,
                                                    uint32_t barrier) {
    constexpr int kUnits = Tile::kDepth * Codec::kUnitBytes;  // of a row block
    constexpr int kBoxBytes = Tile::kBox * 128;
    constexpr int kMostBoxes = kTokens / Tile::kBox;
    const int block = item.row_tile * Tile::kRowBlocks;
    const int blocks = max(0, min(Tile::kRowBlocks, args.row_blocks - block));
    const int boxes = kMostBoxes == 1 ? 1 : (item.tile.rows + Tile::kBox - 1) / Tile::kBox;
    ptx::barrier_arrive_expect(barrier, blocks * kUnits + Tile::kDepth * boxes * kBoxBytes);
    const int64_t pitch = static_cast<int64_t>(args.k_blocks) * Codec::kUnitBytes;
    const uint8_t* weights =
        args.weights + item.tile.expert * args.expert_bytes + block * pitch + step * kUnits;
#pragma unroll
    for (int b = 0; b < Tile::kRowBlocks; ++b) {
      if (b < blocks) {
        ptx::bulk_copy(stage + b * kUnits, weights + b * pitch, kUnits, barrier);
      }
    }
#pragma unroll
    for (int box = 0; box < kMostBoxes; ++box) {
      if (box >= boxes || box % Tile::kCluster != rank()) {
        continue;
      }
      const int row = item.tile.first + box * Tile::kBox;
#pragma unroll
      for (int d = 0; d < Tile::kDepth; ++d) {
        const uint32_t to = stage + Shared::kWeightBytes + d * Shared::kXBytes + box * kBoxBytes;
        const int column = (step * Tile::kDepth + d) * Codec::kBlockElements;
        if constexpr (Tile::kCluster == 1) {
          ptx::tensor_copy(to, x, column, row, barrier);
        } else {
          ptx::tensor_copy_to_all(to, x, column, row, barrier, (1 << Tile::kCluster) - 1);
        }
      }
    }
  }

  static __device__ __forceinline__ void fill(const CUtensorMap& x,
                                              const GroupedSm90Args& args,
                                              uint32_t base) {
    const uint32_t full = base + Shared::kBarriers;
    const uint32_t empty = full + 8 * Tile::kStages;
    if constexpr (Tile::kCluster > 1) {
      ptx::cluster_wait();  // all have their barriers
    }
    ptx::wait_for_predecessor();
    Place place;
    int count = 0;
    for (Items items(args); items.more(); items.advance()) {
      const Item item(items);
      for (int step = 0; step < args.steps; ++step, ++count) {
        if (count >= Tile::kStages) {
          ptx::barrier_wait_to_refill(empty + 8 * place.stage, place.parity ^ 1);
        }
        copy_stage(x, args, item, step, base + place.stage * Shared::kStageBytes,
                   full + 8 * place.stage);
        place.advance();
      }
    }
  }

  // --- the multiplying warpgroups ---

  // An item as the product of its expert alone, whose first row is the tile's.
  static __device__ __forceinline__ GemmSm90Args product_of(const GroupedSm90Args& args,
                                                            const ExpertTile& tile) {
    const int64_t y_bytes = args.result == GemmResult::kBf16 ? 2 : 4;
    const uint8_t* scales = args.weights + tile.expert * args.expert_bytes + args.code_bytes;
    GemmSm90Args own;
    own.weight_scales = reinterpret_cast<const float*>(scales);
    own.x_scales = args.x_scales + tile.first;
    own.bias = args.bias == nullptr ? nullptr : args.bias + int64_t{tile.expert} * args.n;
    own.y = static_cast<uint8_t*>(args.y) + int64_t{tile.first} * args.n * y_bytes;
    own.y_stride = args.n;
    own.m = tile.rows;
    own.n = args.n;
    own.result = args.result;
    return own;
  }

  // The products of an item of up to kCount rows, from the next stages on.
  template <int kCount>
  static __device__ __forceinline__ void multiply_rows(
      const GroupedSm90Args& args, const Item& item, Place& place, int group, uint32_t base) {
    using Rows = TokensOf<Tile, kCount>;
    const int thread = static_cast<int>(threadIdx.x & 127);
    const GemmSm90Args own = product_of(args, item.tile);
    const GemmPart part{.row_tile = item.row_tile};
    const ChannelTerms<Tile::kBlocks> terms = load_terms<Codec, Rows>(own, part, group, thread);
    const TokenTerms<kCount> tokens = load_token_terms<Codec, Rows>(own, part, thread);
    ptx::MmaSum<Codec::kType> sums[Tile::kBlocks][kCount / 2];
    clear(sums);
    accumulate<Codec, Tile, kCount>(sums, place, __shfl_sync(0xffffffffU, args.steps, 0), group,
                                    thread, base);
    store_rows<Codec, Rows>(sums, own, terms, tokens, part, group, thread,
                            StoreRooms::of_group<Shared>(base, group));
  }

  // The same, of as many tokens as the rows need, which are more than kCount - kStep.
  template <int kCount = kLeast>
  static __device__ __forceinline__ void multiply_item(
      const GroupedSm90Args& args, const Item& item, Place& place, int group, uint32_t base) {
    if constexpr (kCount < kTokens) {
      if (__shfl_sync(0xffffffffU, item.tile.rows, 0) > kCount) {
        return multiply_item<kCount + kStep>(args, item, place, group, base);
      }
    }
    multiply_rows<kCount>(args, item, place, group, base);
  }

  static __device__ __forceinline__ void multiply_items(const GroupedSm90Args& args,
                                                        int group,
                                                        uint32_t base) {
    if constexpr (Tile::kCluster > 1) {
      ptx::cluster_wait();
    }
    ptx::wait_for_predecessor();
    ptx::allow_successor();
    Items items(args);
    Place place;
    bool more = uniform(items.more());
    Item next = more ? Item(items) : Item();
    while (more) {
      const Item item = next;
      items.advance();
      more = uniform(items.more());
      if (more) {
        next = Item(items);  // on its way while this one is multiplied
      }
      multiply_item(args, item, place, group, base);
    }
  }
};

/// y of all items. x [slots, k] in boxes of one K block x kBox rows.
template <typename Codec, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kResident)
    gemm_grouped_sm90(const __grid_constant__ CUtensorMap x,
                      const __grid_constant__ GroupedSm90Args args) {
  using Shared = GemmShared<Codec, Tile>;
  using Loop = GroupedLoop<Codec, Tile>;
  extern __shared__ uint8_t shared[];
  const uint32_t raw = ptx::shared_address(shared);
  const uint32_t base = __shfl_sync(0xffffffffU, (raw + 1023U) & ~1023U, 0);
  const int warp = __shfl_sync(0xffffffffU, static_cast<int>(threadIdx.x >> 5), 0);
  if (threadIdx.x == 128 * Tile::kGroups) {
    ptx::prefetch_tensor_map(x);
    ptx::init_ring<Tile::kStages>(base + Shared::kBarriers,
                                  4 * Tile::kGroups * Tile::kCluster * ptx::kWarpArrivals);
    ptx::barrier_init_fence();
  }
  begin_codec<Codec>();
  ptx::announce_barriers<Tile::kCluster>();
  if (warp >= 4 * Tile::kGroups) {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_release<40>();
    }
    if (threadIdx.x == 128 * Tile::kGroups) {
      Loop::fill(x, args, base);
    } else if constexpr (Tile::kCluster > 1) {
      ptx::cluster_wait();
    }
  } else {
    if constexpr (Tile::kTakesRegisters) {
      ptx::registers_take<232>();
    }
    Loop::multiply_items(args, warp >> 2, base);
  }
  if constexpr (Tile::kCluster > 1) {
    ptx::cluster_sync();  // the others may still arrive at this block's barriers
  }
}

/// An instance of the kernel and what its launch needs.
template <typename Codec, typename Tile>
constexpr GroupedSm90Tile grouped_tile() {
  return {.tokens = Tile::kTokens,
          .step = Tile::kStep,
          .box = Tile::kBox,
          .depth = Tile::kDepth,
          .resident = Tile::kResident,
          .cluster = Tile::kCluster,
          .threads = Tile::kThreads,
          .shared_bytes = GemmShared<Codec, Tile>::kBytes,
          .kernel = gemm_grouped_sm90<Codec, Tile>};
}

}  // namespace nibble::cuda
