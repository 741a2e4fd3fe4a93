#pragma once

#include <cstdint>

#include <cuda.h>

#include "backend/cuda/kernels/experts_sm90/items.cuh"
#include "backend/cuda/kernels/experts_sm90/store.cuh"
#include "backend/cuda/kernels/w4a16_sm90/codecs.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/mma_sum.cuh"

// The products of experts_sm90/loop.cuh for experts of few rows, bound by the reading of weights:
// wgmma takes as long for 8 tokens as for 64, mma.sync does not. Warps of a block share an item's
// channels and K. Copies are few and large: one thread starts them, which takes it 100 clocks each.
namespace nibble::cuda {

/// Items of kRowWarps x 32 channels and kTokens rows; a stage is 128 of K for each of kKWarps sets
/// of warps.
template <int kTokens_, int kRowWarps_, int kKWarps_, int kStages_>
struct ExpertsFewTile {
  static constexpr int kTokens = kTokens_, kStep = kTokens_, kRowWarps = kRowWarps_,
                       kKWarps = kKWarps_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarps = kRowWarps * kKWarps;
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kItemBlocks = kRowWarps / 2;
  static_assert(kRowWarps % 2 == 0 && kRowWarps <= 8 && kKWarps > 1);
};

template <typename Codec, typename Tile>
struct ExpertsFewLoop {
  using Layout = typename Codec::Layout;
  using Items = ExpertItems<Tile>;
  using Item = ExpertItem;
  static constexpr int kTokens = Tile::kTokens, kOctets = kTokens / 8, kStages = Tile::kStages;
  using Sums = float[2][kOctets][4];  // of a warp's two slices of 16 channels

  // A stage: pairs of each row block along K, then as many times two panels of x.
  static constexpr int kPairs = Tile::kKWarps;
  static constexpr int kPanelBytes = kTokens * 128;
  static constexpr int kX = (Tile::kItemBlocks * kPairs * Layout::kPairBytes + 1023) / 1024 * 1024;
  static constexpr int kXBytes = 2 * kPairs * kPanelBytes;
  static constexpr int kStageBytes = kX + kXBytes;
  static constexpr int kBarriers = kStages * kStageBytes;  // full, then empty
  static constexpr int kExchange = (kBarriers + 16 * kStages + 127) / 128 * 128;
  static constexpr bool kTwoSets = Tile::kKWarps == 2;
  static constexpr int kSumsBytes = (kTwoSets ? 1 : 2) * kOctets * 512;  // of a warp, exchanged
  static constexpr int kExchangeBytes = Tile::kWarps * kSumsBytes;
  static constexpr int kBytes = kExchange + 2 * kExchangeBytes;  // of two items
  static_assert(kBytes <= 232448);                               // of a block

  struct Place {
    uint32_t stage, full;
    uint32_t parity = 0;
    __device__ __forceinline__ explicit Place(uint32_t base)
        : stage(base), full(base + kBarriers) {}
    [[nodiscard]] __device__ __forceinline__ uint32_t empty() const { return full + 8 * kStages; }
    __device__ __forceinline__ void advance(uint32_t base) {
      stage += kStageBytes;
      full += 8;
      if (stage == base + kBarriers) {
        stage = base;
        full = base + kBarriers;
        parity ^= 1;
      }
    }
  };

  static __device__ __forceinline__ int stages_of_item(const ExpertsSm90Args& args) {
    return (args.pairs + kPairs - 1) / kPairs;
  }

  // --- the copying warp, one thread of it ---

  static __device__ __forceinline__ void copy_stage(const CUtensorMap& x,
                                                    const ExpertsSm90Args& args,
                                                    const Item& item,
                                                    int first,
                                                    const Place& place) {
    const int blocks = min(Tile::kItemBlocks, args.row_blocks - item.block);
    const int bytes = min(kPairs, args.pairs - first) * Layout::kPairBytes;
    ptx::barrier_arrive_expect(place.full, blocks * bytes + kXBytes);
    const uint8_t* weights =
        args.weights + item.tile.expert * args.expert_bytes +
        (static_cast<int64_t>(item.block) * args.pairs + first) * Layout::kPairBytes;
    for (int b = 0; b < blocks; ++b) {
      ptx::bulk_copy(place.stage + b * (kPairs * Layout::kPairBytes), weights, bytes, place.full);
      weights += static_cast<int64_t>(args.pairs) * Layout::kPairBytes;
    }
    ptx::tensor_copy(place.stage + kX, x, 0, item.tile.first * args.x_step, 2 * first, place.full);
  }

  static __device__ __forceinline__ void fill_ring(const CUtensorMap& x,
                                                   const ExpertsSm90Args& args,
                                                   uint32_t base) {
    wait_for_rows(args);
    Items items(args, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    Item item;
    Place place(base);
    int count = 0;
    while (items.next(item)) {
      for (int first = 0; first < args.pairs; first += kPairs, ++count) {
        if (count >= kStages) {
          ptx::barrier_wait_to_refill(place.empty(), place.parity ^ 1);
        }
        copy_stage(x, args, item, first, place);
        place.advance(base);
      }
    }
  }

  // --- the multiplying warps ---

  // A warp's channels and set, and which of the sets' shares of the sums it begins with.
  struct Warp {
    int row, k, turn;
  };

  // Where the lane's row of load_matrix4 begins in a box: matrix l / 8 is eight of K, its row l % 8
  // a token. Bit 6 tells the halves of a box apart.
  static __device__ __forceinline__ uint32_t lane_of_x() {
    const uint32_t lane = threadIdx.x & 31, row = lane & 7, eight = lane >> 3;
    return row * 128 + (eight ^ row) * 16;
  }

  // A warp's pair of a stage, two slices.
  static __device__ __forceinline__ void multiply_stage(Sums& sums,
                                                        uint32_t stage,
                                                        int row_warp,
                                                        int k_warp) {
    const uint32_t lane = threadIdx.x & 31;
    const uint32_t slices = stage + (row_warp / 2 * kPairs + k_warp) * Layout::kPairBytes +
                            row_warp % 2 * 2 * Layout::kSliceBytes;
    const uint32_t x = stage + kX + 2 * k_warp * kPanelBytes + lane_of_x();
    uint4 words[2][2];  // of unit u, slice s; all are on their way before the first is used
    uint32_t scales[2][2][Codec::kScales];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint32_t slice = slices + s * Layout::kSliceBytes;
        words[u][s] = ptx::load_shared16(slice + Layout::codes(u) + lane * 16);
#pragma unroll
        for (int g = 0; g < Codec::kScales; ++g) {
          scales[u][s][g] =
              ptx::load_shared4(slice + Layout::scales(u) + g * Layout::kGroupBytes + lane / 4 * 4);
        }
      }
    }
    uint32_t b[2][kOctets][4];
    const auto load_x = [&](int part) {  // 32 of K
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        ptx::load_matrix4(b[part % 2][o],
                          (part % 2 == 0 ? x : x ^ 64) + part / 2 * kPanelBytes + o * 1024);
      }
    };
    load_x(0);
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      if (part + 1 < 4) {
        load_x(part + 1);
      }
      const int u = part / 2, half = part % 2;
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const typename Codec::Terms terms(scales[u][s]);
        const uint4& four = words[u][s];
        const uint32_t two[2] = {half == 0 ? four.x : four.z, half == 0 ? four.y : four.w};
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          uint32_t a[4];
          Codec::decode(two[e], terms, Codec::kScales == 2 ? half : 0, a);
#pragma unroll
          for (int o = 0; o < kOctets; ++o) {
            ptx::warp_mma_bf16_sum(sums[s][o], a, b[half][o][2 * e], b[half][o][2 * e + 1],
                                   sums[s][o]);
          }
        }
      }
    }
  }

  // Adds up the sums of all sets, in their order, and stores them: of a lane's numbers each set has
  // its share, which changes with the item.
  static __device__ __forceinline__ void add_and_store(const Sums& sums,
                                                       const ExpertsSm90Args& args,
                                                       const Item& item,
                                                       const Warp& warp,
                                                       uint32_t room) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const uint32_t own = room + warp.row * Tile::kKWarps * kSumsBytes + lane * 4;
#pragma unroll
    for (int w = 0; w < 2 * kOctets; ++w) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::store_shared4(own + warp.k * kSumsBytes + (4 * w + i) * 128,
                           __float_as_uint(sums[w / kOctets][w % kOctets][i]));
      }
    }
    ptx::group_sync(1 + warp.row, 32 * Tile::kKWarps);
    constexpr int kShares = 4 * kOctets;  // a token's two channels, of an octet and a slice
    for (int share = warp.turn; share < kShares; share += Tile::kKWarps) {
      const uint32_t from = own + (share / 2 * 4 + share % 2) * 128;
      float first = 0.0F, second = 0.0F;
#pragma unroll
      for (int of = 0; of < Tile::kKWarps; ++of) {
        first += __uint_as_float(ptx::load_shared4(from + of * kSumsBytes));
        second += __uint_as_float(ptx::load_shared4(from + of * kSumsBytes + 256));
      }
      const int word = share / 2;
      const ChannelPair pair(args, item.tile, 4 * item.block + 2 * warp.row + word / kOctets);
      const int row = 8 * (word % kOctets) + 2 * (lane & 3) + share % 2;
      pair.store(args, item.tile, row, first / Codec::kShrink, second / Codec::kShrink);
    }
  }

  // The same of two sets, each of which adds up and stores one of the two slices.
  static __device__ __forceinline__ void exchange_and_store(const Sums& sums,
                                                            const ExpertsSm90Args& args,
                                                            const Item& item,
                                                            const Warp& warp,
                                                            uint32_t room) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const bool second = warp.k == 1;
    const uint32_t pair_room = room + warp.row * 2 * kSumsBytes + lane * 16;
    float total[kOctets][4];
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      float given[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[o][i] = second ? sums[1][o][i] : sums[0][o][i];
        given[i] = second ? sums[0][o][i] : sums[1][o][i];
      }
      ptx::store_shared16(pair_room + warp.k * kSumsBytes + o * 512, sum_word(given));
    }
    ptx::group_sync(1 + warp.row, 64);
    const ChannelPair pair(args, item.tile, 4 * item.block + 2 * warp.row + warp.k);
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
      add_word(total[o], ptx::load_shared16(pair_room + (1 - warp.k) * kSumsBytes + o * 512));
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        pair.store(args, item.tile, 8 * o + 2 * (lane & 3) + t, total[o][t] / Codec::kShrink,
                   total[o][2 + t] / Codec::kShrink);
      }
    }
  }

  static __device__ __forceinline__ void multiply_items(const ExpertsSm90Args& args,
                                                        int index,
                                                        uint32_t base) {
    wait_for_rows(args);
    ptx::allow_successor();
    Items items(args, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    Item item;
    Warp warp{index % Tile::kRowWarps, index / Tile::kRowWarps, index / Tile::kRowWarps};
    const int stages = stages_of_item(args);
    Place place(base);
    uint32_t room = base + kExchange;
    while (items.next(item)) {
      Sums sums = {};
      for (int s = 0; s < stages; ++s) {
        ptx::barrier_wait(place.full, place.parity);
        if (s * kPairs + warp.k < args.pairs) {
          multiply_stage(sums, place.stage, warp.row, warp.k);
        }
        ptx::warp_arrive(place.empty());
        place.advance(base);
      }
      if constexpr (kTwoSets) {
        exchange_and_store(sums, args, item, warp, room);
      } else {
        add_and_store(sums, args, item, warp, room);
      }
      room = 2 * (base + kExchange) + kExchangeBytes - room;
      warp.turn = (warp.turn + Tile::kKWarps / 2) % Tile::kKWarps;
    }
    wait_for_neighbour(args);
  }
};

/// y of all items. x [slots, k] bf16 in boxes of kTokens rows and all panels of a stage.
template <typename Codec, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    gemm_experts_few_sm90(const __grid_constant__ CUtensorMap x,
                          const __grid_constant__ ExpertsSm90Args args) {
  using Loop = ExpertsFewLoop<Codec, Tile>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = ptx::shared_address(shared);
  const int warp = static_cast<int>(threadIdx.x >> 5);
  if (threadIdx.x == 32 * Tile::kWarps) {
    ptx::prefetch_tensor_map(x);
    ptx::init_ring<Tile::kStages>(base + Loop::kBarriers, Tile::kWarps * ptx::kWarpArrivals);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (warp < Tile::kWarps) {
    Loop::multiply_items(args, warp, base);
  } else if (threadIdx.x == 32 * Tile::kWarps) {
    Loop::fill_ring(x, args, base);
  }
}

}  // namespace nibble::cuda
