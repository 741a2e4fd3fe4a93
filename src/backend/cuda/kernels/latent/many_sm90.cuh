#pragma once

// Latent attention for items of 64 queries (sm_90a): queries are the 64 rows of warpgroup products.
//
// Four warpgroups: one fetches; one multiplies queries by a tile's rows and makes weights of the
// scores; two multiply weights by the tile's first 512 numbers, 256 each, so that the tensor cores
// have work while weights are made.

#include "backend/cuda/kernels/latent/latent.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace nibble::cuda {

constexpr int kManyQueries = 64;
constexpr int kManyThreads = 512;
constexpr int kManyTokens = 64;  // of a tile
using ManyRing = LatentRing<kManyTokens, 2, 4>;
constexpr uint32_t kManyQueryBytes = kManyQueries / 8 * kLatentGroup;
constexpr uint32_t kManyWeightBytes = kManyQueries * kManyTokens * 2;
constexpr int kManyShared = static_cast<int>(ManyRing::kBytes + kManyQueryBytes + kManyWeightBytes);

using ManyScores = float[kManyTokens / 2];

// Hardware barriers: of the warpgroup that makes weights, and with those that read them.
constexpr uint32_t kWeigherBarrier = 1;
constexpr uint32_t kWeightsFull = 2;   // weights and factors are there
constexpr uint32_t kWeightsEmpty = 3;  // they have been read
constexpr uint32_t kWeightThreads = 384;

/// Shared memory of the kernel.
struct ManyShared {
  ManyRing ring;
  uint32_t queries;
  uint32_t weights;  // [64, 64] bf16 of a tile, 128-byte swizzle
  float* factors;    // [64] that earlier sums are to be multiplied by
};

/// Softmax state of rows g and g + 8 of this lane's warp.
struct ManyRows {
  float top[2];
  float total[2];
};

/// Scores [8 tokens / 2][4] become weights; `keep`: what earlier sums are to be multiplied by. The
/// other warpgroups wait for it: chains are short.
__device__ __forceinline__ void weigh_many(ManyScores& scores,
                                           float factor,
                                           ManyRows& rows,
                                           float (&keep)[2]) {
  constexpr int kChains = 4;
  float top[2][kChains];
#pragma unroll
  for (int i = 0; i < 2 * kChains; ++i) {
    top[i / kChains][i % kChains] = -INFINITY;
  }
#pragma unroll
  for (int e = 0; e < kManyTokens / 2; ++e) {
    float& chain = top[e >> 1 & 1][e / 8 % 2 * 2 + e % 2];
    chain = fmaxf(chain, scores[e]);
  }
  float shift[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r][0] = fmaxf(fmaxf(top[r][0], top[r][1]), fmaxf(top[r][2], top[r][3]));
    top[r][0] = fmaxf(top[r][0], __shfl_xor_sync(~0U, top[r][0], 1));
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    top[r][0] = fmaxf(top[r][0], __shfl_xor_sync(~0U, top[r][0], 2));
    top[r][0] = fmaxf(top[r][0], rows.top[r]);
    // A row may have seen nothing yet.
    shift[r] = top[r][0] == -INFINITY ? 0.0F : top[r][0] * factor;
    keep[r] = ptx::exp2_approx(fmaf(rows.top[r], factor, -shift[r]));
    rows.top[r] = top[r][0];
  }
  float total[2][kChains] = {};
#pragma unroll
  for (int e = 0; e < kManyTokens / 2; ++e) {
    scores[e] = ptx::exp2_approx(fmaf(scores[e], factor, -shift[e >> 1 & 1]));
    total[e >> 1 & 1][e / 8 % 2 * 2 + e % 2] += scores[e];
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.total[r] =
        fmaf(rows.total[r], keep[r], (total[r][0] + total[r][1]) + (total[r][2] + total[r][3]));
  }
}

/// Scores of a tile: queries by rows.
__device__ __forceinline__ void multiply_many(uint32_t queries, uint32_t tile, ManyScores& scores) {
#pragma unroll
  for (float& score : scores) {
    score = 0.0F;
  }
  ptx::mma_fence();
#pragma unroll
  for (int step = 0; step < kLatentDim / 16; ++step) {
    ptx::mma_shared<ptx::MmaType::kBf16, kManyTokens>(scores, LatentOperand<>::rows(queries, step),
                                                      LatentOperand<>::rows(tile, step));
  }
  ptx::mma_commit();
  ptx::mma_wait<0>();
  ptx::pin(scores);
}

/// Weights of rows g and g + 8 to shared memory.
__device__ __forceinline__ void store_weights(const ManyScores& scores,
                                              uint32_t weights,
                                              int row,
                                              int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto at = weights + static_cast<uint32_t>((row + 8 * r) * 128 + lane % 4 * 4);
#pragma unroll
    for (int i = 0; i < kManyTokens / 8; ++i) {
      ptx::store_shared4(at + static_cast<uint32_t>((i ^ (lane / 4)) * 16),
                         ptx::pack_bf16(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
    }
  }
}

/// The warpgroup that makes weights.
template <typename Work>
__device__ __forceinline__ void weigh_segments(const LatentArgs& args, const ManyShared& shared) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  uint32_t index = 0;  // of tiles
  bool given = false;  // something was published
  const auto publish = [&](const float(&factors)[2]) {
    if (lane % 4 == 0) {
      shared.factors[row] = factors[0];
      shared.factors[row + 8] = factors[1];
    }
    ptx::fence_shared_to_async();
    ptx::group_arrive(kWeightsFull, kWeightThreads);
    given = true;
  };
  const auto wait_read = [&] {
    if (given) {
      ptx::group_sync(kWeightsEmpty, kWeightThreads);
    }
  };
  for (Work work(args); work.more(); work.next(args)) {
    const LatentSegment segment = work.segment();
    fetch_queries<kManyQueries>(args, segment, shared.queries, thread);
    ptx::copy_wait<0>();
    ptx::fence_shared_to_async();
    ptx::group_sync(kWeigherBarrier, 128);
    const int32_t seen[2] = {segment.seen(args, row), segment.seen(args, row + 8)};
    const int32_t always = segment.seen(args, 0);  // what all queries of the item see
    ManyRows rows{{-INFINITY, -INFINITY}, {0.0F, 0.0F}};
    for (int32_t tile = segment.first_tile; tile < segment.end_tile; ++tile, ++index) {
      const int32_t first = tile * kManyTokens;
      shared.ring.wait_full(index);
      if (first + kManyTokens > segment.kv_len) {  // values past the end must be finite
        clear_rows<kManyTokens>(shared.ring.tile(index), segment.kv_len - first, thread);
        ptx::group_sync(kWeigherBarrier, 128);
      }
      ManyScores scores;
      multiply_many(shared.queries, shared.ring.tile(index), scores);
      if (first + kManyTokens > always) {
#pragma unroll
        for (int e = 0; e < kManyTokens / 2; ++e) {
          const int32_t token = first + e / 4 * 8 + lane % 4 * 2 + e % 2;
          scores[e] = token < seen[e >> 1 & 1] ? scores[e] : -INFINITY;
        }
      }
      float keep[2];
      weigh_many(scores, args.score_factor, rows, keep);
      wait_read();
      store_weights(scores, shared.weights, row, lane);
      publish(keep);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.total[r] += __shfl_xor_sync(~0U, rows.total[r], 1);
      rows.total[r] += __shfl_xor_sync(~0U, rows.total[r], 2);
    }
    const bool whole = segment.slot < 0;
    const float last[2] = {whole ? 1.0F / rows.total[0] : 1.0F,
                           whole ? 1.0F / rows.total[1] : 1.0F};
    wait_read();
    publish(last);
    if (!whole && lane % 4 == 0) {
      float2* const tops = args.partial_tops + int64_t{segment.slot} * args.columns;
      tops[row] = make_float2(rows.top[0], rows.total[0]);
      tops[row + 8] = make_float2(rows.top[1], rows.total[1]);
    }
  }
  wait_read();  // barriers are left as they were found
}

/// Sums of 256 numbers: a product of 256 columns needs more registers than a block of so many
/// threads begins with.
using ManySums = float[2][64];

/// Sums of rows g and g + 8, times their factors.
__device__ __forceinline__ void scale_sums(ManySums& sums, float first, float second) {
#pragma unroll
  for (int i = 0; i < 128; ++i) {
    sums[i / 64][i % 64] *= (i >> 1 & 1) == 0 ? first : second;
  }
}

/// Gives a segment's sums of 256 numbers out.
__device__ __forceinline__ void give_sums(const LatentArgs& args,
                                          const LatentSegment& segment,
                                          const ManySums& sums,
                                          int row,
                                          int column) {
  const int32_t queries = segment.queries(args);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = row + 8 * r;
    if (query >= queries) {
      continue;
    }
    if (segment.slot < 0) {
      uint16_t* const out = segment.result(args, query) + column;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        *reinterpret_cast<uint32_t*>(out + 8 * i) =
            ptx::pack_bf16(sums[i / 16][i % 16 * 4 + 2 * r], sums[i / 16][i % 16 * 4 + 2 * r + 1]);
      }
    } else {
      const int64_t at = int64_t{segment.slot} * args.columns + query;
      float* const out = args.partial_sums + at * kLatentValues + column;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        *reinterpret_cast<float2*>(out + 8 * i) =
            make_float2(sums[i / 16][i % 16 * 4 + 2 * r], sums[i / 16][i % 16 * 4 + 2 * r + 1]);
      }
    }
  }
}

/// A warpgroup that sums values: numbers 256 half..+255.
template <typename Work>
__device__ __forceinline__ void sum_segments(const LatentArgs& args,
                                             const ManyShared& shared,
                                             int half) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  uint32_t index = 0;
  ManySums sums;
  for (Work work(args); work.more(); work.next(args)) {
    const LatentSegment segment = work.segment();
#pragma unroll
    for (int i = 0; i < 128; ++i) {
      sums[i / 64][i % 64] = 0.0F;
    }
    for (int32_t tile = segment.first_tile; tile < segment.end_tile; ++tile, ++index) {
      ptx::group_sync(kWeightsFull, kWeightThreads);
      const float first = shared.factors[row];
      const float second = shared.factors[row + 8];
      if (__any_sync(~0U, first != 1.0F || second != 1.0F)) {
        scale_sums(sums, first, second);
      }
      ptx::mma_fence();
#pragma unroll
      for (int piece = 0; piece < 4; ++piece) {
        const uint32_t at = shared.ring.tile(index) + static_cast<uint32_t>(piece) * kLatentPiece;
        const uint32_t weights = shared.weights + static_cast<uint32_t>(piece) * 32;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::mma_shared<ptx::MmaType::kBf16, 128, true>(
              sums[i], ptx::swizzled_descriptor(weights),
              LatentOperand<>::values(at, half * 4 + i * 2));
        }
        ptx::mma_commit();
      }
      const auto release = [&](uint32_t piece) {
        if (lane == 0) {  // each warp's products end for themselves
          ptx::barrier_arrive(shared.ring.empty_of(index, piece));
        }
      };
      ptx::mma_wait<3>();
      release(0);
      ptx::mma_wait<2>();
      release(1);
      ptx::mma_wait<1>();
      release(2);
      ptx::mma_wait<0>();
      release(3);
      ptx::pin(sums[0]);
      ptx::pin(sums[1]);
      ptx::group_arrive(kWeightsEmpty, kWeightThreads);
    }
    ptx::group_sync(kWeightsFull, kWeightThreads);
    const float first = shared.factors[row];
    const float second = shared.factors[row + 8];
    ptx::group_arrive(kWeightsEmpty, kWeightThreads);
    scale_sums(sums, first, second);
    give_sums(args, segment, sums, row, half * 256 + lane % 4 * 2);
  }
}

/// Work: LatentLine, or LatentBlock with a grid of (items of kPrefillRows rows, blocks of rows).
template <typename Work>
__global__ __launch_bounds__(kManyThreads,
                             1) void many_latent_kernel(const __grid_constant__ LatentArgs args) {
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[ManyRing::kBarriers];
  __shared__ float factors[kManyQueries];
  ManyShared shared{};
  shared.ring.tiles = ptx::shared_address(memory);
  shared.ring.barriers = ptx::shared_address(barriers);
  shared.queries = shared.ring.tiles + ManyRing::kBytes;
  shared.weights = shared.queries + kManyQueryBytes;
  shared.factors = factors;
  if (threadIdx.x == 0) {
    shared.ring.init(8);  // warps that sum
    ptx::barrier_init_fence();
  }
  ptx::allow_successor();
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 3) {
    ptx::registers_release<32>();
    if (threadIdx.x / 32 == 12) {
      fetch_latents<Work>(args, shared.ring, static_cast<int>(threadIdx.x) % 32);
    }
  } else if (group == 2) {
    ptx::registers_take<136>();
    ptx::wait_for_predecessor();
    weigh_segments<Work>(args, shared);
  } else {
    ptx::registers_take<168>();
    ptx::wait_for_predecessor();
    sum_segments<Work>(args, shared, group);
  }
}

}  // namespace nibble::cuda
