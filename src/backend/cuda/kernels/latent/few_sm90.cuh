#pragma once

// Latent attention for items of 8 or 16 queries (sm_90a): tokens, then the numbers of values, are
// the 64 rows of warpgroup products and queries their columns, so that little is multiplied in
// vain.
//
// One warpgroup multiplies, a warp fetches.

#include "backend/cuda/kernels/latent/queries.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nibble::cuda {

constexpr int kFewThreads = 160;
constexpr int kFewBlocks = kLatentValues / 64;  // products of 64 numbers of values
constexpr int kFewTokens = 64;                  // of a tile

/// Form: how rows are kept (few_bf16.cuh, few_codes.cuh, few_int4.cuh).
template <typename Form>
struct FewShared {
  static constexpr int kColumns = Form::kColumns;
  static constexpr uint32_t kWeightBytes = kColumns * kFewTokens * 2;
  static constexpr uint32_t kWeightsAt = Form::Ring::kBytes + Form::Queries::kBytes;
  static constexpr int kBytes = static_cast<int>(kWeightsAt + kWeightBytes);
  static_assert(kWeightsAt % 1024 == 0);
  typename Form::Ring ring;
  uint32_t queries;
  uint32_t weights;        // [kColumns, 64] of 2 bytes of a tile, 128-byte swizzle
  float* of_warps;         // [2][4][kColumns] tops or totals of the warps
  QueryPlace query_place;  // of queries that are not as they came: scales [kColumns]
};

/// The scales of the queries that a lane has scores of.
template <typename Form, int kColumns = Form::kColumns>
__device__ __forceinline__ void load_query_scales(const FewShared<Form>& shared,
                                                  int thread,
                                                  float (&scales)[kColumns / 4]) {
#pragma unroll
  for (int q = 0; q < kColumns / 4; ++q) {
    scales[q] = shared.query_place.scales[q / 2 * 8 + thread % 4 * 2 + q % 2];
  }
}

/// Softmax state of queries 8 n + 2 (lane % 4) + c, as [2 n + c]. Totals are of this lane's tokens.
template <int kColumns>
struct FewQueries {
  static constexpr int kOwn = kColumns / 4;
  float top[kOwn];
  float total[kOwn];
};

/// What the warps have of each query, put together.
template <int kColumns, typename Join>
__device__ __forceinline__ void join_warps(float (&values)[kColumns / 4],
                                           float* of_warps,
                                           int thread,
                                           const Join& join) {
  const int lane = thread % 32;
#pragma unroll
  for (int q = 0; q < kColumns / 4; ++q) {
#pragma unroll
    for (int step = 4; step <= 16; step *= 2) {
      values[q] = join(values[q], __shfl_xor_sync(~0U, values[q], step));
    }
    if (lane < 4) {
      of_warps[thread / 32 * kColumns + q / 2 * 8 + lane * 2 + q % 2] = values[q];
    }
  }
  ptx::group_sync(1, 128);
#pragma unroll
  for (int q = 0; q < kColumns / 4; ++q) {
    const float* const from = of_warps + q / 2 * 8 + lane % 4 * 2 + q % 2;
    values[q] = join(join(from[0], from[kColumns]), join(from[2 * kColumns], from[3 * kColumns]));
  }
}

/// Scores [query tile][token half][2] of a tile become weights in shared memory; `keep`: what
/// earlier sums are to be multiplied by; `units`: what weights of the lane's two tokens count in
/// totals.
template <typename Form, int kColumns = Form::kColumns>
__device__ __forceinline__ void weigh_few(const float (&scores)[kColumns / 2],
                                          const float (&units)[2],
                                          float factor,
                                          const FewShared<Form>& shared,
                                          float* of_warps,
                                          int thread,
                                          FewQueries<kColumns>& queries,
                                          float (&keep)[kColumns / 4]) {
  const int lane = thread % 32;
  float top[kColumns / 4];
#pragma unroll
  for (int q = 0; q < kColumns / 4; ++q) {
    const int at = q / 2 * 4 + q % 2;
    top[q] = fmaxf(queries.top[q], fmaxf(scores[at], scores[at + 2]));
  }
  join_warps<kColumns>(top, of_warps, thread, [](float a, float b) { return fmaxf(a, b); });
  const int token = thread / 32 * 16 + lane / 4;
#pragma unroll
  for (int q = 0; q < kColumns / 4; ++q) {
    const float shift = top[q] == -INFINITY ? 0.0F : top[q] * factor;
    keep[q] = ptx::exp2_approx(fmaf(queries.top[q], factor, -shift));
    queries.top[q] = top[q];
    queries.total[q] *= keep[q];
    const int query = q / 2 * 8 + lane % 4 * 2 + q % 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float weight =
          ptx::exp2_approx(fmaf(scores[q / 2 * 4 + q % 2 + 2 * r], factor, -shift));
      queries.total[q] += weight * units[r];
      const int chunk = (token / 8 + r) ^ (query % 8);
      ptx::store_shared2(
          shared.weights + static_cast<uint32_t>(query * 128 + chunk * 16 + token % 8 * 2),
          static_cast<uint16_t>(Form::pack(weight, 0.0F)));
    }
  }
  ptx::fence_shared_to_async();
  ptx::group_sync(1, 128);
}

/// Gives a segment's sums out, each times its query's factor. Rows lane / 4 and lane / 4 + 8 of
/// product `block` are numbers Form::first_dim(thread) + Form::dim_of(block, 0 or 1).
template <typename Form, int kColumns = Form::kColumns>
__device__ __forceinline__ void give_few(const LatentArgs& args,
                                         const LatentSegment& segment,
                                         const float (&sums)[kFewBlocks][kColumns / 2],
                                         const float (&factors)[kColumns / 4],
                                         int thread) {
  const int lane = thread % 32;
  const int32_t count = segment.queries(args);
  const int dim = Form::first_dim(thread);
#pragma unroll
  for (int q = 0; q < kColumns / 4; ++q) {
    const int query = q / 2 * 8 + lane % 4 * 2 + q % 2;
    if (query >= count) {
      continue;
    }
    const int at = q / 2 * 4 + q % 2;
    const bool whole = segment.slot < 0;
    uint16_t* const out = segment.result(args, query) + dim;
    float* const partial =
        args.partial_sums + (int64_t{segment.slot} * args.columns + query) * kLatentValues + dim;
#pragma unroll
    for (int block = 0; block < kFewBlocks; ++block) {
      const float first = sums[block][at];
      const float second = sums[block][at + 2];
      constexpr bool kNeighbours = Form::dim_of(0, 1) == Form::dim_of(0, 0) + 1;
      if (whole) {
        const uint32_t both = ptx::pack_bf16(first * factors[q], second * factors[q]);
        if constexpr (kNeighbours) {
          *reinterpret_cast<uint32_t*>(out + Form::dim_of(block, 0)) = both;
        } else {
          out[Form::dim_of(block, 0)] = static_cast<uint16_t>(both);
          out[Form::dim_of(block, 1)] = static_cast<uint16_t>(both >> 16);
        }
      } else if constexpr (kNeighbours) {
        *reinterpret_cast<float2*>(partial + Form::dim_of(block, 0)) = make_float2(first, second);
      } else {
        partial[Form::dim_of(block, 0)] = first;
        partial[Form::dim_of(block, 1)] = second;
      }
    }
  }
}

/// The multiplying warpgroup.
template <typename Form, typename Work>
__device__ __forceinline__ void attend_few(const LatentArgs& args,
                                           const FewShared<Form>& shared,
                                           int thread) {
  constexpr int kColumns = Form::kColumns;
  constexpr int kOwn = kColumns / 4;
  const int lane = thread % 32;
  const int own_token = thread / 32 * 16 + lane / 4;
  uint32_t index = 0;
  uint32_t taken = 0;  // segments
  for (Work work(args); work.more(); work.next(args), ++taken) {
    const LatentSegment segment = work.segment();
    take_queries<typename Form::Queries>(args, segment, shared.query_place, taken, thread, work);
    ptx::group_sync(1, 128);
    const Form form(args, shared, thread);
    const int32_t always = segment.seen(args, 0);  // what all queries of the item see
    FewQueries<kColumns> queries;
    float sums[kFewBlocks][kColumns / 2];
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      queries.top[q] = -INFINITY;
      queries.total[q] = 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kFewBlocks * kColumns / 2; ++i) {
      sums[i / (kColumns / 2)][i % (kColumns / 2)] = 0.0F;
    }
    for (int32_t tile = segment.first_tile; tile < segment.end_tile; ++tile, ++index) {
      const int32_t first = tile * kFewTokens;
      shared.ring.wait_full(index);
      if (first + kFewTokens > segment.kv_len) {  // values past the end must be finite
        clear_rows(shared.ring, index, segment.kv_len - first, thread);
        ptx::group_sync(1, 128);
      }
      float scores[kColumns / 2];
      float units[2];
      form.multiply(shared, index, own_token, scores, units);
      if (first + kFewTokens > always) {
#pragma unroll
        for (int e = 0; e < kColumns / 2; ++e) {
          const int query = e / 4 * 8 + lane % 4 * 2 + e % 2;
          const int32_t token = first + own_token + (e >> 1 & 1) * 8;
          scores[e] = token < segment.seen(args, query) ? scores[e] : -INFINITY;
        }
      }
      float keep[kOwn];
      weigh_few<Form>(scores, units, args.score_factor, shared,
                      shared.of_warps + index % 2 * 4 * kColumns, thread, queries, keep);
      bool risen = false;
#pragma unroll
      for (int q = 0; q < kOwn; ++q) {
        risen = risen || keep[q] != 1.0F;
      }
      if (__any_sync(~0U, risen)) {
#pragma unroll
        for (int i = 0; i < kFewBlocks * kColumns / 2; ++i) {
          const int e = i % (kColumns / 2);
          sums[i / (kColumns / 2)][e] *= keep[e / 4 * 2 + e % 2];
        }
      }
      form.sum(shared, index, thread, sums);
    }
    ptx::group_sync(1, 128);  // all have read what the last tile's tops were joined from
    join_warps<kColumns>(queries.total, shared.of_warps, thread,
                         [](float a, float b) { return a + b; });
    float factors[kOwn];
#pragma unroll
    for (int q = 0; q < kOwn; ++q) {
      factors[q] = 1.0F / queries.total[q];
      const int query = q / 2 * 8 + lane % 4 * 2 + q % 2;
      if (segment.slot >= 0 && thread < 4) {
        args.partial_tops[segment.slot * args.columns + query] =
            make_float2(queries.top[q], queries.total[q]);
      }
    }
    give_few<Form>(args, segment, sums, factors, thread);
    ptx::group_sync(1, 128);  // totals have been read
  }
}

/// Work: as of many_latent_sm90().
template <typename Form, typename Work>
__global__ __launch_bounds__(kFewThreads, Form::kBlocks) void few_latent_sm90(
    const __grid_constant__ LatentArgs args) {
#if __CUDA_ARCH__ >= 900
  using Shared = FewShared<Form>;
  extern __shared__ __align__(1024) uint8_t memory[];
  __shared__ __align__(8) uint64_t barriers[Form::Ring::kBarriers];
  __shared__ float of_warps[2 * 4 * Form::kColumns];
  __shared__ __align__(16) float query_scales[Form::kColumns];
  __shared__ __align__(8) uint64_t query_barrier;
  Shared shared{};
  shared.ring.tiles = ptx::shared_address(memory);
  shared.ring.barriers = ptx::shared_address(barriers);
  shared.queries = shared.ring.tiles + Form::Ring::kBytes;
  shared.weights = shared.ring.tiles + Shared::kWeightsAt;
  shared.of_warps = of_warps;
  shared.query_place.codes = shared.queries;
  shared.query_place.scales = query_scales;
  shared.query_place.barrier = ptx::shared_address(&query_barrier);
  if (threadIdx.x == 0) {
    shared.ring.init(4);  // warps that multiply
    ptx::barrier_init(shared.query_place.barrier, 1);
    ptx::barrier_init_fence();
  }
  ptx::allow_successor();
  __syncthreads();
  if (threadIdx.x >= 128) {
    fetch_latents<Work>(args, shared.ring, static_cast<int>(threadIdx.x) % 32);
  } else {
    ptx::wait_for_predecessor();
    attend_few<Form, Work>(args, shared, static_cast<int>(threadIdx.x));
  }
#endif
}

}  // namespace nibble::cuda
