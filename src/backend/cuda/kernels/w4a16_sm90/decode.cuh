#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/store.cuh"
#include "backend/cuda/kernels/w4a16_sm90/decode.h"
#include "backend/cuda/kernels/w4a16_sm90/layout.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/cluster.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/mma_sum.cuh"

// yᵀ = w · xᵀ of few tokens and INT4 weights in groups, bound by the reading of weights: rows are
// dealt to the multiprocessors in slices of 16, so that all have nearly the same to read and no
// sums cross between them (or within a cluster at most), and warps of a block share K.
//
// A byte alone in a BF16 is that integer times 2^-133, also where it reaches into the exponent: a
// code, or 16 codes, becomes a weight by one exact product and one exact offset, rounded once. It
// takes nine operations for eight weights, five of them integer. Weights are kShrink times what
// they are, so that the factors fit, and sums are put right when they are stored.
namespace nibble::cuda {

template <int kGroupSize, int kTokens>
struct W4A16DecodeLoop {
  using Layout = Int4GroupLayout<kGroupSize>;
  static constexpr int kOctets = kTokens / 8;
  static constexpr int kBoxBytes = kTokens * 128;  // of x, 64 of K
  using Sums = float[2][kOctets][4];               // of a warp's two slices

  // Where things lie in shared memory: the ring, sums, those of the other block of a cluster,
  // barriers. A stage is x, weights.
  struct Place {
    uint32_t ring, sums, others, barriers;
    int stage_bytes;
    __device__ __forceinline__ Place(uint32_t base, const W4A16DecodePlan& plan)
        : ring(base),
          sums(ring + plan.stages * plan.stage_bytes),
          others(sums + 2 * plan.warps * kOctets * 512),
          barriers(others + kW4A16DecodeMostTile / 2 * kOctets * 512),
          stage_bytes(plan.stage_bytes) {}
    __device__ __forceinline__ uint32_t stage(int slot) const { return ring + slot * stage_bytes; }
    // A stage is there; all of it is used up; the others' sums are there.
    __device__ __forceinline__ uint32_t full(int slot) const { return barriers + 8 * slot; }
    __device__ __forceinline__ uint32_t empty(int slot) const { return full(slot) + kToEmpty; }
    __device__ __forceinline__ uint32_t others_there() const { return barriers + 2 * kToEmpty; }
    static constexpr uint32_t kToEmpty = 8 * kW4A16DecodeStages;
  };

  static __device__ __forceinline__ int ceil_div(int a, int b) {
    return a <= 0 ? 0 : (a + b - 1) / b;
  }

  // This block's part of the work: tiles `tile`, `tile + step`, ... and pairs [begin, end) of K,
  // `steps` steps for each of `tiles` tiles.
  struct Share {
    int tile, tile_step, begin, end, steps, tiles;
    __device__ __forceinline__ explicit Share(const W4A16DecodeArgs& args) {
      const int shift = args.plan.cluster - 1;  // clusters of one block or two
      const int rank = static_cast<int>(blockIdx.x) & shift;
      tile = static_cast<int>(blockIdx.x) >> shift;
      tile_step = args.plan.blocks >> shift;
      begin = args.pairs * rank >> shift;
      end = args.pairs * (rank + 1) >> shift;
      steps = ceil_div(end - begin, args.plan.step_pairs);
      tiles = ceil_div(args.plan.tiles - tile, tile_step);
    }
  };

  // First slice of a tile.
  static __device__ __forceinline__ int first_slice(const W4A16DecodeArgs& args, int tile) {
    return tile * args.plan.least + min(tile, args.plan.larger);
  }

  // --- weights ---

  // A tile's weights as the copies of its steps find them.
  struct Source {
    const uint8_t* from;  // of the first pair of this block's share
    int64_t row_bytes;    // from one pair to the next
    uint32_t bytes;       // of a pair: the tile's slices lie together
    __device__ __forceinline__ Source(const W4A16DecodeArgs& args, const Share& share, int tile)
        : row_bytes(static_cast<int64_t>(args.packed_slices) * Layout::kSliceBytes) {
      const int first = first_slice(args, tile);
      bytes = (first_slice(args, tile + 1) - first) * Layout::kSliceBytes;
      from = args.weights + share.begin * row_bytes + first * Layout::kSliceBytes;
    }
    __device__ __forceinline__ void skip(int pairs) { from += pairs * row_bytes; }
    // Weights of the next step, `pairs` pairs.
    __device__ __forceinline__ void copy(const W4A16DecodeArgs& args,
                                         const Place& place,
                                         int pairs,
                                         int slot) {
      const uint32_t barrier = place.full(slot);
      uint32_t to = place.stage(slot) + args.plan.weights_at;
      ptx::barrier_arrive_expect(barrier, pairs * bytes);
#pragma unroll 1
      for (int i = 0; i < pairs; ++i) {
        ptx::bulk_copy(to, from, bytes, barrier);
        to += args.plan.tile * Layout::kSliceBytes;
        from += row_bytes;
      }
    }
  };

  // One thread: weights of all steps.
  static __device__ __forceinline__ void fill_ring(const W4A16DecodeArgs& args,
                                                   const Place& place) {
    const Share share(args);
    const int stages = args.plan.stages, step_pairs = args.plan.step_pairs;
    if (args.plan.cluster > 1) {  // has one tile
      const int words =
          (first_slice(args, share.tile + 1) - first_slice(args, share.tile)) * kOctets;
      const int rank = static_cast<int>(blockIdx.x) % 2;
      ptx::barrier_arrive_expect(place.others_there(), (words + 1 - rank) / 2 * 512);
    }
    int count = 0, slot = 0;
    uint32_t parity = 1;
    for (int tile = share.tile; tile < args.plan.tiles; tile += share.tile_step) {
      Source source(args, share, tile);
      for (int pair = share.begin; pair < share.end; pair += step_pairs, ++count) {
        if (count >= stages) {
          ptx::barrier_wait_to_refill(place.empty(slot), parity);
        }
        source.copy(args, place, min(step_pairs, share.end - pair), slot);
        if (++slot == stages) {
          slot = 0;
          parity ^= 1;
        }
      }
    }
  }

  // --- activations ---

  // Activations as the copies of the steps find them: 16 bytes a lane, in boxes of 64 of K whose
  // eights of K are swizzled by the token. They do not go the way of the weights: they would have
  // to wait behind a ring of them. Rows beyond the last token are copies of it, or stay as they
  // are: what comes of them is not stored.
  struct XSource {
    static constexpr int kRows = kTokens / 2;  // of a lane: half a warp has two rows' 16 eights
    const uint8_t* rows[kRows];                // at the next pair
    uint32_t place_of_lane;
    int m;
    __device__ __forceinline__ XSource(const W4A16DecodeArgs& args, const Share& share)
        : m(args.m) {
      const int lane = static_cast<int>(threadIdx.x & 31), eight = lane & 15, odd = lane >> 4;
      place_of_lane = eight / 8 * kBoxBytes + odd * 128 + ((eight & 7) ^ odd) * 16;
      const auto* x = static_cast<const uint8_t*>(args.x) + share.begin * 256 + eight * 16;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        rows[r] = x + static_cast<int64_t>(min(2 * r + odd, m - 1)) * args.k * 2;
      }
    }
    __device__ __forceinline__ void advance(int pairs) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        rows[r] += pairs * 256;
      }
    }
    // Activations of the next step, `pairs` pairs.
    __device__ __forceinline__ void load(const Place& place, int pairs, int slot) {
      uint32_t to = place.stage(slot) + place_of_lane;
#pragma unroll 2
      for (int i = 0; i < pairs; ++i) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (kTokens > 8 || 2 * r < m) {
            ptx::copy_async16((to ^ (32 * (r & 3))) + r * 256, rows[r]);
          }
        }
        to += 2 * kBoxBytes;
        advance(1);
      }
      ptx::copy_arrive(place.full(slot));
    }
  };

  // One warp: activations of all steps.
  static __device__ __forceinline__ void load_x(const W4A16DecodeArgs& args, const Place& place) {
    const Share share(args);
    XSource source(args, share);
    const int stages = args.plan.stages, step_pairs = args.plan.step_pairs;
    ptx::wait_for_predecessor();
    int slot = 0;
    uint32_t parity = 1;
    for (int count = 0; count < share.tiles * share.steps;) {
      for (int pair = share.begin; pair < share.end; pair += step_pairs, ++count) {
        if (count >= stages) {
          ptx::barrier_wait(place.empty(slot), parity);
        }
        source.load(place, min(step_pairs, share.end - pair), slot);
        if (++slot == stages) {
          slot = 0;
          parity ^= 1;
        }
      }
      source.advance(share.begin - share.end);
    }
  }

  // Where the lane's row of load_matrix4 begins in a box: matrix l / 8 is eight of K, its row l % 8
  // a token. Bit 6 tells the halves of a box apart.
  static __device__ __forceinline__ uint32_t lane_of_x() {
    const uint32_t lane = threadIdx.x & 31, row = lane & 7, eight = lane >> 3;
    return row * 128 + (eight ^ row) * 16;
  }

  // --- the multiplying warps ---

  static constexpr float kShrink = 0x1p-40F;         // of weights
  static constexpr uint32_t kFactors = 0x6c006e00U;  // 2^89, 2^93: to kShrink from 16 codes, a code
  static constexpr uint32_t kOffsets = 0xad00ad00U;  // -8 kShrink

  // What the codes of a lane's two rows are multiplied with, and what is added.
  struct Scales {
    uint32_t factors, offsets;
    __device__ __forceinline__ explicit Scales(uint32_t scales)
        : factors(ptx::mul_bf16x2(scales, kFactors)), offsets(ptx::mul_bf16x2(scales, kOffsets)) {}
  };

  // Codes of 16 of K as a fragment of weights.
  static __device__ __forceinline__ void decode(uint32_t word,
                                                const Scales& scales,
                                                uint32_t (&a)[4]) {
    const uint32_t factors[2] = {ptx::low_twice(scales.factors), ptx::high_twice(scales.factors)};
    const uint32_t offsets[2] = {ptx::low_twice(scales.offsets), ptx::high_twice(scales.offsets)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = (word >> (i / 2 * 8)) & (i % 2 == 0 ? 0x000f000fU : 0x00f000f0U);
      a[i] = ptx::fma_bf16x2(codes, factors[i % 2], offsets[i % 2]);
    }
  }

  // What a lane reads of a stage: offsets in it.
  struct Reader {
    uint32_t codes, scales;  // of the first slice
    uint32_t second;         // from the first slice to the second, or none
    uint32_t x;
    __device__ __forceinline__ Reader(const W4A16DecodeArgs& args, int row_warp, int of, bool two)
        : second(two ? Layout::kSliceBytes : 0) {
      const uint32_t lane = threadIdx.x & 31;
      const uint32_t slice = args.plan.weights_at + (of * args.plan.tile + 2 * row_warp) *
                                                        static_cast<uint32_t>(Layout::kSliceBytes);
      codes = slice + lane * 16;
      scales = slice + lane / 4 * 4;
      x = 2 * of * kBoxBytes + lane_of_x();
    }
  };

  // One pair of the stage, two slices.
  static __device__ __forceinline__ void multiply_pair(Sums& sums,
                                                       const Reader& reader,
                                                       uint32_t stage) {
    constexpr bool kOne = kGroupSize == 128;  // group
    const uint32_t x0 = stage + reader.x, x[2] = {x0, x0 ^ 64};
    const uint32_t codes[2] = {stage + reader.codes, stage + reader.codes + reader.second};
    const uint32_t at[2] = {stage + reader.scales, stage + reader.scales + reader.second};
    const Scales both[2] = {Scales(kOne ? ptx::load_shared4(at[0] + Layout::scales(0)) : 0),
                            Scales(kOne ? ptx::load_shared4(at[1] + Layout::scales(0)) : 0)};
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      uint32_t words[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint4 four = ptx::load_shared16(codes[s] + Layout::codes(u));
        words[s][0] = four.x, words[s][1] = four.y, words[s][2] = four.z, words[s][3] = four.w;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t b[kOctets][4];
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          ptx::load_matrix4(b[o], x[half] + u * kBoxBytes + o * 1024);
        }
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const Scales scales = kOne ? both[s]
                                     : Scales(ptx::load_shared4(at[s] + Layout::scales(u) +
                                                                half * Layout::kGroupBytes));
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            uint32_t a[4];
            decode(words[s][2 * half + e], scales, a);
#pragma unroll
            for (int o = 0; o < kOctets; ++o) {
              ptx::warp_mma_bf16_sum(sums[s][o], a, b[o][2 * e], b[o][2 * e + 1], sums[s][o]);
            }
          }
        }
      }
    }
  }

  // This warp's steps of a tile, whose first is the `count`th of the block. Sets of warps take the
  // steps in turn, a warp of each for every pair of a step and two slices.
  static __device__ __forceinline__ void accumulate(Sums& sums,
                                                    const W4A16DecodeArgs& args,
                                                    const Place& place,
                                                    const Share& share,
                                                    int slices,
                                                    int count) {
    const W4A16DecodePlan& plan = args.plan;
    const int warp = static_cast<int>(threadIdx.x >> 5);
    const int row_warp = warp % plan.row_warps, k_warp = warp / plan.row_warps;
    const int set = k_warp / plan.step_pairs, of = k_warp % plan.step_pairs;
    const Reader reader(args, row_warp, of, 2 * row_warp + 1 < slices);
    // Steps of the set, and those that hold a pair of this warp: of a tile that is a slice smaller
    // the last warps may have no rows, and of the last step some no pair.
    const int first = set * plan.step_pairs;
    int steps = ceil_div(share.end - share.begin - first, plan.k_warps);
    int pairs = ceil_div(share.end - share.begin - first - of, plan.k_warps);
    if (2 * row_warp >= slices) {
      pairs = 0;
    }
    steps -= pairs;
    const int slot = (count + set) % plan.stages;
    uint32_t parity = (count + set) / plan.stages & 1;
    uint32_t stage = place.stage(slot), barrier = place.full(slot);
    const auto release = [&] {
      ptx::warp_arrive(barrier + Place::kToEmpty);
      stage += plan.set_bytes;
      barrier += 8 * plan.sets;
      if (barrier >= place.full(plan.stages)) {
        stage -= plan.ring_bytes;
        barrier -= 8 * plan.stages;
        parity ^= 1;
      }
    };
    for (; pairs > 0; --pairs) {
      ptx::barrier_wait(barrier, parity);
      multiply_pair(sums, reader, stage);
      release();
    }
    for (; steps > 0; --steps) {
      ptx::barrier_wait(barrier, parity);
      release();
    }
  }

  // --- results ---

  // Four sums of a lane: two channels of two tokens.
  static __device__ __forceinline__ void store_word(
      const W4A16DecodeArgs& args, int slice, int octet, int lane, const float (&sums)[4]) {
    const int row = 16 * slice + 2 * (lane >> 2), token0 = 8 * octet + 2 * (lane & 3);
    if (row >= args.n) {
      return;
    }
    const bool both = row + 1 < args.n;
    float2 bias{0.0F, 0.0F};
    if (args.bias != nullptr) {
      bias.x = args.bias[row];
      bias.y = both ? args.bias[row + 1] : 0.0F;
    }
    const bool pairs = args.n % 2 == 0 && args.y_stride % 2 == 0;
    with_result(args.result, [&]<GemmResult kResult>() {
      constexpr int kBytes = kResult == GemmResult::kBf16 ? 2 : 4;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int token = token0 + t;
        if (token >= args.m) {
          break;
        }
        auto* y = static_cast<uint8_t*>(args.y) + (token * args.y_stride + row) * kBytes;
        const float first = fmaf(sums[t], 1.0F / kShrink, bias.x);
        const float second = fmaf(sums[2 + t], 1.0F / kShrink, bias.y);
        if (pairs) {
          store_pair<kResult, true>(y, both, first, second);
        } else {
          store_pair<kResult, false>(y, both, first, second);
        }
      }
    });
  }

  // Adds up what the warps of this block, or of all of its cluster, have of the tile, always in the
  // same order, and stores it.
  static __device__ __forceinline__ void finish(const Sums& sums,
                                                const W4A16DecodeArgs& args,
                                                const Place& place,
                                                int first,
                                                int slices,
                                                bool last) {
    const W4A16DecodePlan& plan = args.plan;
    const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31);
    if (plan.k_warps == 1 && plan.cluster == 1) {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          if (2 * warp + s < slices) {
            store_word(args, first + 2 * warp + s, o, lane, sums[s][o]);
          }
        }
      }
      return;
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int o = 0; o < kOctets; ++o) {
        ptx::store_shared16(place.sums + ((2 * warp + s) * kOctets + o) * 512 + lane * 16,
                            sum_word(sums[s][o]));
      }
    }
    ptx::group_sync(1, 32 * plan.warps);
    const int rank = static_cast<int>(blockIdx.x) % plan.cluster;
    const int words = slices * kOctets;
    // Of two blocks one stores the even words, to the other it sends the odd ones.
    const auto add_up = [&](int i, float(&total)[4]) {
      const int slice = i / kOctets, octet = i % kOctets;
#pragma unroll 4
      for (int k_warp = 0; k_warp < plan.k_warps; ++k_warp) {
        add_word(total,
                 ptx::load_shared16(
                     place.sums + ((2 * k_warp * plan.row_warps + slice) * kOctets + octet) * 512 +
                     lane * 16));
      }
    };
    if (plan.cluster > 1) {
      ptx::cluster_wait();  // the other has begun
      const uint32_t there = ptx::peer_address(place.others_there(), 1 - rank);
      for (int i = 2 * warp + 1 - rank; i < words; i += 2 * plan.warps) {
        float total[4] = {};
        add_up(i, total);
        ptx::store_async16(ptx::peer_address(place.others + i / 2 * 512 + lane * 16, 1 - rank),
                           sum_word(total), there);
      }
    }
    for (int i = plan.cluster * warp + rank; i < words; i += plan.cluster * plan.warps) {
      float total[4] = {};
      add_up(i, total);
      if (plan.cluster > 1) {
        ptx::barrier_wait(place.others_there(), 0);
        add_word(total, ptx::load_shared16(place.others + i / 2 * 512 + lane * 16));
      }
      store_word(args, first + i / kOctets, i % kOctets, lane, total);
    }
    if (!last) {
      ptx::group_sync(1, 32 * plan.warps);
    }
  }

  static __device__ __forceinline__ void multiply_tiles(const W4A16DecodeArgs& args,
                                                        const Place& place) {
    ptx::wait_for_predecessor();
    const Share share(args);
    int count = 0;
    for (int tile = share.tile; tile < args.plan.tiles; tile += share.tile_step) {
      const int first = first_slice(args, tile), slices = first_slice(args, tile + 1) - first;
      Sums sums = {};
      accumulate(sums, args, place, share, slices, count);
      count += share.steps;
      finish(sums, args, place, first, slices, tile + share.tile_step >= args.plan.tiles);
    }
  }
};

/// y of the tiles that args.plan gives to this block. x [m, k] bf16.
template <int kGroupSize, int kTokens>
__global__ void __launch_bounds__(w4a16_decode_threads(kW4A16DecodeWarps), 1)
    gemm_w4a16_decode_sm90(const __grid_constant__ W4A16DecodeArgs args) {
  using Loop = W4A16DecodeLoop<kGroupSize, kTokens>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::shared_address(shared) + 1023U) & ~1023U;
  const typename Loop::Place place(base, args.plan);
  const int warp = static_cast<int>(threadIdx.x >> 5), lane = static_cast<int>(threadIdx.x & 31);
  const int warps = args.plan.warps;  // that multiply
  if (warp == warps && lane == 0) {   // several lanes would take turns, too, and longer
#pragma unroll 1
    for (int slot = 0; slot < args.plan.stages; ++slot) {
      ptx::barrier_init(place.full(slot), 1 + 32);
      ptx::barrier_init(place.empty(slot),
                        args.plan.row_warps * args.plan.step_pairs * ptx::kWarpArrivals);
    }
    if (args.plan.cluster > 1) {
      ptx::barrier_init(place.others_there(), 1);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::allow_successor();
  if (args.plan.cluster > 1) {
    ptx::cluster_arrive_relaxed();
  }
  if (warp < warps) {
    Loop::multiply_tiles(args, place);
  } else if (warp > warps) {
    Loop::load_x(args, place);
  } else if (lane == 0) {
    Loop::fill_ring(args, place);
  }
}

}  // namespace nibble::cuda
