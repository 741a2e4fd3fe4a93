#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90_store.cuh"
#include "backend/cuda/kernels/gemm_w4a16_decode_sm90.h"
#include "backend/cuda/kernels/gemm_w4a16_layout.cuh"
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
// A weight is never decoded alone: placed in the mantissa of 128 it is the BF16 number code + 136,
// two weights in one or two integer operations. What that adds to the sums of a group, 136 times
// the sum of x, comes from one more product, of a constant matrix of -136, which a warp's slices
// share; group sums are then scaled in f32. Source of the placing: Kim, Henry, Fahim, Awadalla,
// "Who Says Elephants Can't Run: Bringing Large Scale MoE Models into Cloud Scale Production",
// 2022.
namespace nibble::cuda {

template <int kGroupSize, int kTokens>
struct W4A16DecodeLoop {
  using Layout = Int4GroupLayout<kGroupSize>;
  static constexpr int kOctets = kTokens / 8;
  static constexpr int kBoxBytes = kTokens * 128;  // of x, 64 of K
  using Sums = float[2][kOctets][4];               // of a warp's two slices

  // Where things lie in shared memory: a ring of x, one of weights, sums, barriers (full, empty).
  struct Place {
    uint32_t x, weights, sums, barriers;
    __device__ __forceinline__ Place(uint32_t base, const W4A16DecodePlan& plan)
        : x(base),
          weights(x + plan.stages * plan.x_bytes),
          sums(weights + plan.stages * plan.weight_bytes),
          barriers(sums + 2 * kW4A16DecodeWarps * kOctets * 512) {}
    __device__ __forceinline__ uint32_t full(int slot) const { return barriers + 8 * slot; }
    __device__ __forceinline__ uint32_t empty(int slot) const {
      return barriers + 8 * (kW4A16DecodeStages + slot);
    }
  };

  // This block's part of the work: tiles `tile`, `tile + step`, ... and pairs [begin, end) of K.
  struct Share {
    int tile, tile_step, begin, end, steps;
    __device__ __forceinline__ explicit Share(const W4A16DecodeArgs& args) {
      const int cluster = args.plan.cluster;
      const int rank = static_cast<int>(blockIdx.x) % cluster;
      tile = static_cast<int>(blockIdx.x) / cluster;
      tile_step = args.plan.blocks / cluster;
      begin = args.pairs * rank / cluster;
      end = args.pairs * (rank + 1) / cluster;
      steps = (end - begin + args.plan.step_pairs - 1) / args.plan.step_pairs;
    }
  };

  // First slice of a tile.
  static __device__ __forceinline__ int first_slice(const W4A16DecodeArgs& args, int tile) {
    return static_cast<int>(static_cast<int64_t>(args.plan.slices) * tile / args.plan.tiles);
  }

  // --- the copying warps, one thread of each ---

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
    // Weights of the next step, `pairs` pairs; the barrier is told of its activations, too.
    __device__ __forceinline__ void copy(const W4A16DecodeArgs& args,
                                         const Place& place,
                                         int pairs,
                                         int slot) {
      const uint32_t barrier = place.full(slot);
      uint32_t to = place.weights + slot * args.plan.weight_bytes;
      ptx::barrier_arrive_expect(
          barrier, pairs * bytes + (args.plan.one_row ? pairs * 256 : args.plan.x_bytes));
#pragma unroll 1
      for (int i = 0; i < pairs; ++i) {
        ptx::bulk_copy(to, from, bytes, barrier);
        to += args.plan.tile * Layout::kSliceBytes;
        from += row_bytes;
      }
    }
  };

  // Activations of one step: boxes of 64 of K, or the one row as it is.
  static __device__ __forceinline__ void copy_x(const CUtensorMap& x,
                                                const W4A16DecodeArgs& args,
                                                const Place& place,
                                                int pair,
                                                int pairs,
                                                int slot) {
    const uint32_t to = place.x + slot * args.plan.x_bytes;
    if (args.plan.one_row) {
      ptx::bulk_copy(to, static_cast<const uint8_t*>(args.x) + pair * 256, pairs * 256,
                     place.full(slot));
    } else {
      ptx::tensor_copy(to, x, 0, 0, 2 * pair, place.full(slot));
    }
  }

  // Copier `copier` of all fills every kW4A16DecodeCopiers-th stage.
  static __device__ __forceinline__ void fill_ring(const CUtensorMap& x,
                                                   const W4A16DecodeArgs& args,
                                                   const Place& place,
                                                   int copier) {
    const Share share(args);
    if (!args.plan.one_row) {
      ptx::prefetch_tensor_map(x);
    }
    const int stages = args.plan.stages, step_pairs = args.plan.step_pairs;
    // Weights of the first ring; activations have to wait until the predecessor has ended.
    int count = 0;
    for (int tile = share.tile; tile < args.plan.tiles && count < stages; tile += share.tile_step) {
      Source source(args, share, tile);
      for (int pair = share.begin; pair < share.end && count < stages;
           pair += step_pairs, ++count) {
        const int pairs = min(step_pairs, share.end - pair);
        if (count % kW4A16DecodeCopiers == copier) {
          source.copy(args, place, pairs, count);
        } else {
          source.skip(pairs);
        }
      }
    }
    ptx::wait_for_predecessor();
    count = 0;
    int slot = 0;
    uint32_t parity = 1;
    for (int tile = share.tile; tile < args.plan.tiles; tile += share.tile_step) {
      Source source(args, share, tile);
      for (int pair = share.begin; pair < share.end; pair += step_pairs, ++count) {
        const int pairs = min(step_pairs, share.end - pair);
        const bool mine = count % kW4A16DecodeCopiers == copier;
        if (mine && count >= stages) {
          ptx::barrier_wait_to_refill(place.empty(slot), parity);
          source.copy(args, place, pairs, slot);
        } else {
          source.skip(pairs);
        }
        if (mine) {
          copy_x(x, args, place, pair, pairs, slot);
        }
        if (++slot == stages) {
          slot = 0;
          parity ^= 1;
        }
      }
    }
  }

  // --- the multiplying warps ---

  // Codes of 16 of K as a fragment of code + 136.
  static __device__ __forceinline__ void place_codes(uint32_t word, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = ptx::lop3<0xea>(word >> (4 * i), 0x000f000fU, 0x43004300U);
    }
  }

  // sums += group times the scales of the thread's two rows.
  static __device__ __forceinline__ void scale_sums(float (&sums)[kOctets][4],
                                                    const float (&group)[kOctets][4],
                                                    uint32_t scales) {
    const float scale[2] = {__uint_as_float(scales << 16), __uint_as_float(scales & 0xffff0000U)};
#pragma unroll
    for (int o = 0; o < kOctets; ++o) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[o][i] = fmaf(group[o][i], scale[i / 2], sums[o][i]);
      }
    }
  }

  // d = a b, added to d unless it is the first of a group; `first` is known when this is compiled.
  static __device__ __forceinline__ void add_product(
      float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool first) {
    constexpr float kZeros[4] = {0.0F, 0.0F, 0.0F, 0.0F};
    if (first) {
      ptx::warp_mma_bf16_sum(d, a, b0, b1, kZeros);
    } else {
      ptx::warp_mma_bf16_sum(d, a, b0, b1, d);
    }
  }

  // One pair: weights of two slices at w, x at `x` with the lane's offset in it.
  static __device__ __forceinline__ void multiply_pair(
      Sums& sums, const uint32_t (&w)[2], uint32_t x, uint32_t x_lane, uint32_t box_bytes) {
    constexpr uint32_t kBias[4] = {0xc308c308U, 0xc308c308U, 0xc308c308U, 0xc308c308U};  // -136
    const uint32_t lane = threadIdx.x & 31;
    float group[2][kOctets][4], bias[kOctets][4];
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      uint32_t words[2][4];
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const uint4 four = ptx::load_shared16(w[s] + Layout::codes(u) + lane * 16);
        words[s][0] = four.x, words[s][1] = four.y, words[s][2] = four.z, words[s][3] = four.w;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t b[kOctets][4];
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          ptx::load_matrix4(b[o], x + u * box_bytes + (x_lane ^ (64 * half)) + o * 1024);
        }
        const bool first = kGroupSize == 32 || (u == 0 && half == 0);
        const bool last = kGroupSize == 32 || (u == 1 && half == 1);
#pragma unroll
        for (int o = 0; o < kOctets; ++o) {
          add_product(bias[o], kBias, b[o][0], b[o][1], first);
          add_product(bias[o], kBias, b[o][2], b[o][3], false);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            uint32_t a[4];
            place_codes(words[s][2 * half + e], a);
#pragma unroll
            for (int o = 0; o < kOctets; ++o) {
              if (kGroupSize == 32 && e == 0) {  // with what is taken away again
                ptx::warp_mma_bf16_sum(group[s][o], a, b[o][0], b[o][1], bias[o]);
              } else {
                add_product(group[s][o], a, b[o][2 * e], b[o][2 * e + 1], first && e == 0);
              }
            }
          }
        }
#pragma unroll
        for (int s = 0; s < 2 && last; ++s) {
          if constexpr (kGroupSize == 128) {
#pragma unroll
            for (int o = 0; o < kOctets; ++o) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                group[s][o][i] += bias[o][i];
              }
            }
          }
          scale_sums(sums[s], group[s],
                     ptx::load_shared4(w[s] + Layout::scales(u) + lane / 4 * 4 +
                                       (kGroupSize == 32 ? half * Layout::kGroupBytes : 0)));
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
                                                    int count,
                                                    uint32_t x_lane) {
    const W4A16DecodePlan& plan = args.plan;
    const int warp = static_cast<int>(threadIdx.x >> 5);
    const int row_warp = warp % plan.row_warps, k_warp = warp / plan.row_warps;
    const int set = k_warp / plan.step_pairs, of = k_warp % plan.step_pairs;
    const int sets = plan.k_warps / plan.step_pairs;
    const bool some = 2 * row_warp < slices, two = 2 * row_warp + 1 < slices;
    const uint32_t box_bytes = plan.one_row ? 128 : kBoxBytes;
    const uint32_t x = place.x + of * 2 * box_bytes;
    const uint32_t w = place.weights +
                       (of * plan.tile + 2 * row_warp) * static_cast<uint32_t>(Layout::kSliceBytes);
    int pair = share.begin + set * plan.step_pairs + of;
    int slot = (count + set) % plan.stages;
    uint32_t parity = (count + set) / plan.stages & 1;
    for (int step = set; step < share.steps; step += sets) {
      ptx::barrier_wait(place.full(slot), parity);
      if (some && pair < share.end) {
        const uint32_t first = w + slot * plan.weight_bytes;
        multiply_pair(sums, {first, two ? first + Layout::kSliceBytes : first},
                      x + slot * plan.x_bytes, x_lane, box_bytes);
      }
      ptx::warp_arrive(place.empty(slot));
      pair += sets * plan.step_pairs;
      slot += sets;
      if (slot >= plan.stages) {
        slot -= plan.stages;
        parity ^= 1;
      }
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
        const float first = sums[t] + bias.x, second = sums[2 + t] + bias.y;
        if (pairs) {
          store_pair<kResult, true>(y, both, first, second);
        } else {
          store_pair<kResult, false>(y, both, first, second);
        }
      }
    });
  }

  static __device__ __forceinline__ float add(uint32_t a, float b) {
    return __uint_as_float(a) + b;
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
                            uint4{__float_as_uint(sums[s][o][0]), __float_as_uint(sums[s][o][1]),
                                  __float_as_uint(sums[s][o][2]), __float_as_uint(sums[s][o][3])});
      }
    }
    if (plan.cluster == 1) {
      ptx::group_sync(1, 32 * kW4A16DecodeWarps);
    } else {
      ptx::cluster_sync();
    }
    const int rank = static_cast<int>(blockIdx.x) % plan.cluster;
    for (int i = warp + rank * kW4A16DecodeWarps; i < slices * kOctets;
         i += plan.cluster * kW4A16DecodeWarps) {
      const int slice = i / kOctets, octet = i % kOctets;
      float total[4] = {};
      for (int peer = 0; peer < plan.cluster; ++peer) {
        for (int k_warp = 0; k_warp < plan.k_warps; ++k_warp) {
          const uint32_t at = place.sums +
                              ((2 * k_warp * plan.row_warps + slice) * kOctets + octet) * 512 +
                              lane * 16;
          const uint4 word = plan.cluster == 1 ? ptx::load_shared16(at)
                                               : ptx::load_cluster16(ptx::peer_address(at, peer));
          total[0] = add(word.x, total[0]);
          total[1] = add(word.y, total[1]);
          total[2] = add(word.z, total[2]);
          total[3] = add(word.w, total[3]);
        }
      }
      store_word(args, first + slice, octet, lane, total);
    }
    if (plan.cluster > 1) {
      ptx::cluster_sync();  // nobody leaves while others read
    } else if (!last) {
      ptx::group_sync(1, 32 * kW4A16DecodeWarps);
    }
  }

  static __device__ __forceinline__ void multiply_tiles(const W4A16DecodeArgs& args,
                                                        const Place& place) {
    ptx::wait_for_predecessor();
    const Share share(args);
    const int lane = static_cast<int>(threadIdx.x & 31);
    const bool works = static_cast<int>(threadIdx.x >> 5) < args.plan.row_warps * args.plan.k_warps;
    // Matrix l / 8 of load_matrix4 is eight of K, its row l % 8 a token; swizzled, but for one row.
    const int row = lane & 7, eight = lane >> 3;
    const uint32_t x_lane = args.plan.one_row ? eight * 16 : row * 128 + (eight ^ row) * 16;
    int count = 0;
    for (int tile = share.tile; tile < args.plan.tiles; tile += share.tile_step) {
      const int first = first_slice(args, tile), slices = first_slice(args, tile + 1) - first;
      Sums sums = {};
      if (works) {
        accumulate(sums, args, place, share, slices, count, x_lane);
      }
      count += share.steps;
      finish(sums, args, place, first, slices, tile + share.tile_step >= args.plan.tiles);
    }
  }
};

/// y of the tiles that args.plan gives to this block. x [m, k] bf16, in boxes of kTokens rows x 64
/// of K, as many as a step takes.
template <int kGroupSize, int kTokens>
__global__ void __launch_bounds__(kW4A16DecodeThreads, 1)
    gemm_w4a16_decode_sm90(const __grid_constant__ CUtensorMap x,
                           const __grid_constant__ W4A16DecodeArgs args) {
  using Loop = W4A16DecodeLoop<kGroupSize, kTokens>;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::shared_address(shared) + 1023U) & ~1023U;
  const typename Loop::Place place(base, args.plan);
  if (threadIdx.x == 0) {
    for (int s = 0; s < args.plan.stages; ++s) {
      ptx::barrier_init(place.full(s), 1);
      ptx::barrier_init(place.empty(s),
                        args.plan.row_warps * args.plan.step_pairs * ptx::kWarpArrivals);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::allow_successor();
  if (threadIdx.x >= 32 * kW4A16DecodeWarps) {
    if (threadIdx.x % 32 == 0) {
      Loop::fill_ring(x, args, place, static_cast<int>(threadIdx.x / 32) - kW4A16DecodeWarps);
    }
  } else {
    Loop::multiply_tiles(args, place);
  }
}

}  // namespace nibble::cuda
