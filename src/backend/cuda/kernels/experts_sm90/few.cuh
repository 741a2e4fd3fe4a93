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

// The products of experts_sm90/loop.cuh for experts of few rows, bound by the reading of weights: wgmma
// takes as long for 8 tokens as for 64, mma.sync does not. Warps of a block share an item's
// channels and K. Copies are few and large: one thread starts them, which takes it 100 clocks each.
namespace nibble::cuda {

/// Items of kRowWarps x 32 channels and kTokens rows; a stage is 128 of K for each of kKWarps sets
/// of warps.
template <int kTokens_, int kRowWarps_, int kKWarps_, int kStages_>
struct ExpertsFewTile {
  static constexpr int kTokens = kTokens_, kRowWarps = kRowWarps_, kKWarps = kKWarps_;
  static constexpr int kStages = kStages_;
  static constexpr int kWarps = kRowWarps * kKWarps;
  static constexpr int kThreads = 32 * (kWarps + 1);
  static constexpr int kItemBlocks = kRowWarps / 2;
  static_assert(kRowWarps % 2 == 0 && kRowWarps <= 8);
};

template <typename Codec, typename Tile>
struct ExpertsFewLoop {
  using Layout = typename Codec::Layout;
  using Items = ExpertItems<Tile>;
  using Item = typename Items::Item;
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
  static constexpr int kSumsBytes = 2 * kOctets * 512;  // of a warp
  static constexpr int kExchangeBytes = Tile::kRowWarps * (Tile::kKWarps - 1) * kSumsBytes;
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
    ptx::tensor_copy(place.stage + kX, x, 0, item.tile.first, 2 * first, place.full);
  }

  static __device__ __forceinline__ void fill_ring(const CUtensorMap& x,
                                                   const ExpertsSm90Args& args,
                                                   uint32_t base) {
    ptx::wait_for_predecessor();
    const Items items(args);
    Place place(base);
    int count = 0;
    for (int i = static_cast<int>(blockIdx.x); i < items.count; i += static_cast<int>(gridDim.x)) {
      const Item item(args, items, i);
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
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      uint32_t words[2][4];
      uint32_t scales[2][Codec::kScales];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint32_t slice = slices + s * Layout::kSliceBytes;
        const uint4 four = ptx::load_shared16(slice + Layout::codes(u) + lane * 16);
        words[s][0] = four.x, words[s][1] = four.y, words[s][2] = four.z, words[s][3] = four.w;
#pragma unroll
        for (int g = 0; g < Codec::kScales; ++g) {
          scales[s][g] = ptx::load_shared4(slice + Layout::scales(u) + g * Layout::kGroupBytes +
                                           lane / 4 * 4);
        }
      }
      const typename Codec::Terms terms[2] = {typename Codec::Terms(scales[0]),
                                              typename Codec::Terms(scales[1])};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t b[kOctets][4];
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          ptx::load_matrix4(b[o], (half == 0 ? x : x ^ 64) + u * kPanelBytes + o * 1024);
        }
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            uint32_t a[4];
            Codec::decode(words[s][2 * half + e], terms[s], Codec::kScales == 2 ? half : 0, a);
#pragma unroll
            for (int o = 0; o < kOctets; ++o) {
              ptx::warp_mma_bf16_sum(sums[s][o], a, b[o][2 * e], b[o][2 * e + 1], sums[s][o]);
            }
          }
        }
      }
    }
  }

  // Adds to the first set's sums those of the others, in their order. `half` of the room.
  static __device__ __forceinline__ void add_sets(
      Sums& sums, int row_warp, int k_warp, int half, uint32_t base) {
    const int lane = static_cast<int>(threadIdx.x & 31);
    const auto room = [&](int of, int word) {
      return base + kExchange + half * kExchangeBytes +
             ((of - 1) * Tile::kRowWarps + row_warp) * kSumsBytes + word * 512 + lane * 16;
    };
    if (k_warp > 0) {
#pragma unroll
      for (int w = 0; w < 2 * kOctets; ++w) {
        ptx::store_shared16(room(k_warp, w), sum_word(sums[w / kOctets][w % kOctets]));
      }
    }
    ptx::group_sync(1 + row_warp, 32 * Tile::kKWarps);
    if (k_warp == 0) {
#pragma unroll
      for (int of = 1; of < Tile::kKWarps; ++of) {
#pragma unroll
        for (int w = 0; w < 2 * kOctets; ++w) {
          add_word(sums[w / kOctets][w % kOctets], ptx::load_shared16(room(of, w)));
        }
      }
    }
  }

  static __device__ __forceinline__ void store(const Sums& sums,
                                               const ExpertsSm90Args& args,
                                               const Item& item,
                                               int row_warp) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int slice = 4 * item.block + 2 * row_warp + s;
      if (16 * slice < args.n) {
        store_slice<kOctets>(sums[s], args, item.tile, slice, 1.0F / Codec::kShrink);
      }
    }
  }

  static __device__ __forceinline__ void multiply_items(const ExpertsSm90Args& args,
                                                        int warp,
                                                        uint32_t base) {
    ptx::wait_for_predecessor();
    ptx::allow_successor();
    const Items items(args);
    const int row_warp = warp % Tile::kRowWarps, k_warp = warp / Tile::kRowWarps;
    const int stages = stages_of_item(args);
    Place place(base);
    int half = 0;
    for (int i = static_cast<int>(blockIdx.x); i < items.count; i += static_cast<int>(gridDim.x)) {
      const Item item(args, items, i);
      Sums sums = {};
      for (int s = 0; s < stages; ++s) {
        ptx::barrier_wait(place.full, place.parity);
        if (s * kPairs + k_warp < args.pairs) {
          multiply_stage(sums, place.stage, row_warp, k_warp);
        }
        ptx::warp_arrive(place.empty());
        place.advance(base);
      }
      if constexpr (Tile::kKWarps > 1) {
        add_sets(sums, row_warp, k_warp, half, base);
        half ^= 1;
      }
      if (k_warp == 0) {
        store(sums, args, item, row_warp);
      }
    }
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
    for (int s = 0; s < Tile::kStages; ++s) {
      ptx::barrier_init(base + Loop::kBarriers + 8 * s, 1);
      ptx::barrier_init(base + Loop::kBarriers + 8 * (Tile::kStages + s),
                        Tile::kWarps * ptx::kWarpArrivals);
    }
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
