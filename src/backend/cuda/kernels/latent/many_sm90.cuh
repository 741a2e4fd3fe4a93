#pragma once

// Latent attention for items of 64 queries (sm_90a): four warpgroups. One fetches, and widens rows
// of 4 bits; one multiplies queries by a tile's rows and makes weights of the scores; two multiply
// weights by the tile's first 512 numbers, 256 each, so that the tensor cores have work while
// weights are made.

#include "backend/cuda/kernels/latent/queries.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/wgmma.cuh"

namespace nibble::cuda {

constexpr int kManyQueries = 64;
constexpr int kManyThreads = 512;
constexpr int kManyTokens = 64;  // of a tile
constexpr uint32_t kManyWeightBytes = kManyQueries * kManyTokens * 2;

using ManyScores = float[kManyTokens / 2];

// Hardware barriers: of the warpgroup that makes weights, and with those that read them, two for
// each buffer of weights.
constexpr uint32_t kWeigherBarrier = 1;
constexpr uint32_t kWeightThreads = 384;
/// Weights and factors are there.
__device__ __forceinline__ uint32_t weights_full(uint32_t buffer) { return 2 + 2 * buffer; }
/// They have been read.
__device__ __forceinline__ uint32_t weights_empty(uint32_t buffer) { return 3 + 2 * buffer; }

/// Shared memory of the kernel. Form: how rows are kept (many_bf16.cuh, many_codes.cuh,
/// many_int4.cuh).
template <typename Form>
struct ManyShared {
  static constexpr uint32_t kWeightsAt = Form::Ring::kBytes + Form::Queries::kBytes;
  static constexpr uint32_t kFetchedAt = kWeightsAt + Form::kWeightBuffers * kManyWeightBytes;
  static constexpr int kBytes = static_cast<int>(kFetchedAt + Form::Fetched::kBytes);
  static_assert(kWeightsAt % 1024 == 0 && kFetchedAt % 1024 == 0);
  typename Form::Ring ring;        // of what is multiplied
  typename Form::Fetched fetched;  // of rows before they are widened
  uint32_t queries;
  uint32_t weights;        // [buffers][64, 64] of 2 bytes of a tile, 128-byte swizzle
  float* factors;          // [buffers][64] that earlier sums are to be multiplied by
  QueryPlace query_place;  // of coded queries
  float4* tokens;          // [2][64] what the scales of a tile's coded rows mean

  [[nodiscard]] __device__ uint32_t weights_of(uint32_t buffer) const {
    return weights + buffer * kManyWeightBytes;
  }
};

/// Of forms that multiply rows as they are fetched.
struct FetchedAsTheyAre {
  struct Fetched {
    static constexpr uint32_t kBytes = 0;
    static constexpr uint32_t kBarriers = 0;
    uint32_t tiles;
    uint32_t barriers;
    __device__ void init(uint32_t /*readers*/) const {}
  };
  static constexpr uint32_t kWriters = 1;  // of a tile
  static constexpr uint32_t kReaders = 0;  // of a fetched one

  /// The warpgroup that fetches.
  template <typename Work, typename Shared>
  static __device__ __forceinline__ void fetch(const LatentArgs& args, const Shared& shared) {
    if (threadIdx.x / 32 == 12) {
      fetch_latents<Work>(args, shared.ring, static_cast<int>(threadIdx.x) % 32);
    }
  }
};

/// Softmax state of rows g and g + 8 of this lane's warp.
struct ManyRows {
  float top[2];
  float total[2];
};

/// Scores [8 tokens / 2][4] become weights; `keep`: what earlier sums are to be multiplied by;
/// unit(e): what weight e counts in totals. The other warpgroups wait for it: chains are short.
template <typename Unit>
__device__ __forceinline__ void weigh_many(
    ManyScores& scores, const Unit& unit, float factor, ManyRows& rows, float (&keep)[2]) {
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
    total[e >> 1 & 1][e / 8 % 2 * 2 + e % 2] += scores[e] * unit(e);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.total[r] =
        fmaf(rows.total[r], keep[r], (total[r][0] + total[r][1]) + (total[r][2] + total[r][3]));
  }
}

/// Weights of rows g and g + 8 to shared memory.
template <typename Form>
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
                         Form::pack(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
    }
  }
}

/// The warpgroup that makes weights.
template <typename Form, typename Work>
__device__ __forceinline__ void weigh_segments(const LatentArgs& args,
                                               const ManyShared<Form>& shared) {
  constexpr uint32_t kBuffers = Form::kWeightBuffers;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  uint32_t index = 0;  // of tiles
  uint32_t given = 0;  // weights and last factors
  uint32_t taken = 0;  // segments
  const auto publish = [&](const float(&factors)[2]) {
    const uint32_t buffer = given % kBuffers;
    if (lane % 4 == 0) {
      shared.factors[buffer * kManyQueries + row] = factors[0];
      shared.factors[buffer * kManyQueries + row + 8] = factors[1];
    }
    ptx::fence_shared_to_async();
    ptx::group_arrive(weights_full(buffer), kWeightThreads);
    ++given;
  };
  const auto wait_read = [&] {
    if (given >= kBuffers) {
      ptx::group_sync(weights_empty(given % kBuffers), kWeightThreads);
    }
  };
  for (Work work(args); work.more(); work.next(args), ++taken) {
    const LatentSegment segment = work.segment();
    ptx::group_sync(kWeigherBarrier, 128);  // all have read the queries before
    take_queries<typename Form::Queries>(args, segment, shared.query_place, taken, thread, work);
    ptx::group_sync(kWeigherBarrier, 128);
    Form form(args, shared, thread);
    const int32_t seen[2] = {segment.seen(args, row), segment.seen(args, row + 8)};
    const int32_t always = segment.seen(args, 0);  // what all queries of the item see
    ManyRows rows{{-INFINITY, -INFINITY}, {0.0F, 0.0F}};
    const auto begin = [&](int32_t tile, uint32_t at) {
      const int32_t known = segment.kv_len - tile * kManyTokens;
      if constexpr (Form::Fetched::kBytes > 0) {
        Form::prepare(shared, at, known, thread);
        shared.ring.wait_full(at);
      } else {
        shared.ring.wait_full(at);
        if (known < kManyTokens) {  // values past the end must be finite
          clear_rows(shared.ring, at, known, thread);
          ptx::group_sync(kWeigherBarrier, 128);
        }
      }
      form.begin(shared, at, thread);
    };
    const auto weigh = [&](int32_t tile, ManyScores& scores) {
      const int32_t first = tile * kManyTokens;
      if (first + kManyTokens > always) {
#pragma unroll
        for (int e = 0; e < kManyTokens / 2; ++e) {
          const int32_t token = first + e / 4 * 8 + lane % 4 * 2 + e % 2;
          scores[e] = token < seen[e >> 1 & 1] ? scores[e] : -INFINITY;
        }
      }
      float keep[2];
      weigh_many(
          scores, [&](int e) { return form.unit(shared, index, thread, e); }, args.score_factor,
          rows, keep);
      wait_read();
      store_weights<Form>(scores, shared.weights_of(given % kBuffers), row, lane);
      publish(keep);
    };
    ManyScores scores;
    begin(segment.first_tile, index);
    for (int32_t tile = segment.first_tile; tile < segment.end_tile - 1; ++tile, ++index) {
      form.finish(shared, index, thread, scores);
      if constexpr (Form::kAhead) {
        begin(tile + 1, index + 1);
        weigh(tile, scores);
      } else {
        weigh(tile, scores);
        begin(tile + 1, index + 1);
      }
    }
    form.finish(shared, index, thread, scores);
    weigh(segment.end_tile - 1, scores);
    ++index;
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
  // Barriers are left as they were found.
  for (uint32_t last = given < kBuffers ? 0 : given - kBuffers; last < given; ++last) {
    ptx::group_sync(weights_empty(last % kBuffers), kWeightThreads);
  }
}

/// Work: LatentLine, or LatentBlock with a grid of (items of kPrefillRows rows, blocks of rows).
template <typename Form, typename Work>
__global__ __launch_bounds__(kManyThreads,
                             1) void many_latent_sm90(const __grid_constant__ LatentArgs args) {
#if __CUDA_ARCH__ >= 900
  using Shared = ManyShared<Form>;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[Form::Ring::kBarriers + Form::Fetched::kBarriers];
  __shared__ float factors[Form::kWeightBuffers * kManyQueries];
  __shared__ __align__(16) float query_scales[kManyQueries];
  __shared__ __align__(8) uint64_t query_barrier;
  __shared__ float4 tokens[Form::kTokenLines];
  Shared shared{};
  shared.ring.tiles = ptx::shared_address(memory);
  shared.ring.barriers = ptx::shared_address(barriers);
  shared.queries = shared.ring.tiles + Form::Ring::kBytes;
  shared.weights = shared.ring.tiles + Shared::kWeightsAt;
  shared.fetched.tiles = shared.ring.tiles + Shared::kFetchedAt;
  shared.fetched.barriers = shared.ring.barriers + 8 * Form::Ring::kBarriers;
  shared.factors = factors;
  shared.query_place.codes = shared.queries;
  shared.query_place.scales = query_scales;
  shared.query_place.barrier = ptx::shared_address(&query_barrier);
  shared.tokens = tokens;
  if (threadIdx.x == 0) {
    shared.ring.init(8, Form::kWriters);  // warps that sum
    shared.fetched.init(Form::kReaders);
    ptx::barrier_init(shared.query_place.barrier, 1);
    ptx::barrier_init_fence();
  }
  ptx::allow_successor();
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / 128;
  if (group == 3) {
    ptx::registers_release<Form::kFetchRegisters>();
    Form::template fetch<Work>(args, shared);
  } else if (group == 2) {
    Form::take_weigher_registers();
    ptx::wait_for_predecessor();
    weigh_segments<Form, Work>(args, shared);
  } else {
    ptx::registers_take<Form::kSumRegisters>();
    ptx::wait_for_predecessor();
    Form::template sum_segments<Work>(args, shared, group);
  }
#endif
}

}  // namespace nibble::cuda
