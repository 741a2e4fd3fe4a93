#pragma once

// Rows in 8 bits for latent attention with many queries (many_sm90.cuh): queries are the rows of
// products of scores, and the columns of those of values.

#include "backend/cuda/kernels/latent/codes.cuh"
#include "backend/cuda/kernels/latent/many_sm90.cuh"

namespace nibble::cuda {

constexpr int kCodedBlocks = 4;  // products of 64 numbers of values, of a warpgroup

/// Sums of 64 numbers by 64 queries each, 256 numbers.
using CodedSums = float[kCodedBlocks][kManyQueries / 2];

template <typename Codes>
class ManyCodes : public FetchedAsTheyAre {
 public:
  static constexpr uint32_t kWeightBuffers = 2;
  static constexpr int kTokenLines = 2 * kManyTokens;
  static constexpr bool kAhead = true;  // a tile's products begin before the one before is weighed
  static constexpr int kFetchRegisters = 24;
  static constexpr int kSumRegisters = 176;
  using Ring = LatentRing<kManyTokens, 3, 4, CodedRows>;
  using Shared = ManyShared<ManyCodes>;
  using Queries = CodedQueries<Codes, kManyQueries>;
  static __device__ __forceinline__ uint32_t pack(float a, float b) { return ptx::pack_f16(a, b); }
  static __device__ __forceinline__ void take_weigher_registers() { ptx::registers_take<136>(); }

  __device__ ManyCodes(const LatentArgs& args, const Shared& shared, int thread)
      : log_unit_(1.0F / args.score_factor) {
    const int row = thread / 32 * 16 + thread % 32 / 4;
    scales_[0] = shared.query_place.scales[row] * Codes::kCarried;
    scales_[1] = shared.query_place.scales[row + 8] * Codes::kCarried;
  }

  /// Starts the products of a tile: of the codes that come first, and of the rotated parts.
  __device__ __forceinline__ void begin(const Shared& shared, uint32_t index, int thread) {
    const uint32_t tile = shared.ring.tile(index);
#pragma unroll
    for (int i = 0; i < kManyTokens / 2; ++i) {
      sums_[i] = 0;
      turned_[i] = 0.0F;
    }
    ptx::pin(sums_);  // zeros are there before the first product
    ptx::pin(turned_);
    ptx::mma_fence();
    add_codes(sums_, shared.queries + (Codes::kHighFirst ? 0 : Queries::kLow), tile);
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      ptx::mma_shared<ptx::MmaType::kBf16, kManyTokens>(
          turned_, QueryRope::rows(shared.queries + Queries::kRope, step),
          CodedOperand::rows(tile, kCodeSteps + step));
    }
    ptx::mma_commit();
    describe_token(shared, index, thread);
  }

  /// Scores of the tile that was begun, with the logarithms of the tokens' scales.
  __device__ __forceinline__ void finish(const Shared& shared,
                                         uint32_t index,
                                         int thread,
                                         ManyScores& scores) {
    ptx::mma_wait<0>();
    ptx::pin(sums_);
    ptx::pin(turned_);
#pragma unroll
    for (auto& sum : sums_) {
      sum = Codes::carry(sum);
    }
    ptx::pin(sums_);
    ptx::mma_fence();
    add_codes(sums_, shared.queries + (Codes::kHighFirst ? Queries::kLow : 0),
              shared.ring.tile(index));
    ptx::mma_commit();
    ptx::group_sync(kWeigherBarrier, 128);  // tokens have been described
    ptx::mma_wait<0>();
    ptx::pin(sums_);
#pragma unroll
    for (int e = 0; e < kManyTokens / 2; ++e) {
      const float4& token = token_of(shared, index, thread, e);
      scores[e] =
          fmaf(static_cast<float>(sums_[e]), scales_[e >> 1 & 1] * token.x, turned_[e] + token.y);
    }
  }

  /// What weight e of the lane counts in totals.
  __device__ __forceinline__ float unit(const Shared& shared,
                                        uint32_t index,
                                        int thread,
                                        int e) const {
    return token_of(shared, index, thread, e).z;
  }

  /// A warpgroup that sums values: numbers 256 half..+255.
  template <typename Work>
  static __device__ __forceinline__ void sum_segments(const LatentArgs& args,
                                                      const Shared& shared,
                                                      int half) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    uint32_t index = 0;
    uint32_t taken = 0;  // weights and last factors
    CodedSums sums;
    for (Work work(args); work.more(); work.next(args)) {
      const LatentSegment segment = work.segment();
#pragma unroll
      for (int i = 0; i < kCodedBlocks * kManyQueries / 2; ++i) {
        sums[i / (kManyQueries / 2)][i % (kManyQueries / 2)] = 0.0F;
      }
      for (int32_t tile = segment.first_tile; tile < segment.end_tile; ++tile, ++index, ++taken) {
        const uint32_t buffer = taken % kWeightBuffers;
        ptx::group_sync(weights_full(buffer), kWeightThreads);
        scale_sums(shared.factors + buffer * kManyQueries, thread, sums);
        add_tile(shared, index, buffer, half, sums);
        ptx::group_arrive(weights_empty(buffer), kWeightThreads);
      }
      const uint32_t buffer = taken % kWeightBuffers;
      ++taken;
      ptx::group_sync(weights_full(buffer), kWeightThreads);
      scale_sums(shared.factors + buffer * kManyQueries, thread, sums);
      ptx::group_arrive(weights_empty(buffer), kWeightThreads);
      give_sums(args, segment, sums, half, thread);
    }
  }

 private:
  static __device__ __forceinline__ void add_codes(typename Codes::Sum (&sums)[kManyTokens / 2],
                                                   uint32_t queries,
                                                   uint32_t tile) {
#pragma unroll
    for (int step = 0; step < kCodeSteps; ++step) {
      ptx::mma_shared<Codes::kType, kManyTokens>(sums, QueryCodes::rows(queries, step),
                                                 CodedOperand::rows(tile, step));
    }
  }

  /// A token's scale, what its logarithm adds to scores, and what weights count in totals, for all
  /// lanes: by one thread for each token, while products run.
  __device__ __forceinline__ void describe_token(const Shared& shared,
                                                 uint32_t index,
                                                 int thread) const {
    if (thread < kManyTokens) {
      const float scale = row_scale(shared.ring.params(index) + static_cast<uint32_t>(4 * thread));
      shared.tokens[index % 2 * kManyTokens + static_cast<uint32_t>(thread)] =
          make_float4(scale, __log2f(scale) * log_unit_, __fdividef(1.0F, scale), 0.0F);
    }
  }
  /// Of the token that score e of the lane belongs to.
  static __device__ __forceinline__ const float4& token_of(const Shared& shared,
                                                           uint32_t index,
                                                           int thread,
                                                           int e) {
    return shared.tokens[index % 2 * kManyTokens +
                         static_cast<uint32_t>(e / 4 * 8 + thread % 4 * 2 + e % 2)];
  }

  /// Sums, times the factors of their queries, 8 n + 2 (lane % 4) and the next.
  static __device__ __forceinline__ void scale_sums(const float* factors,
                                                    int thread,
                                                    CodedSums& sums) {
    float2 own[kManyQueries / 8];
    bool changes = false;
#pragma unroll
    for (int n = 0; n < kManyQueries / 8; ++n) {
      own[n] = *reinterpret_cast<const float2*>(factors + 8 * n + thread % 4 * 2);
      changes = changes || own[n].x != 1.0F || own[n].y != 1.0F;
    }
    if (__any_sync(~0U, changes)) {
#pragma unroll
      for (int i = 0; i < kCodedBlocks * kManyQueries / 2; ++i) {
        const int e = i % (kManyQueries / 2);
        sums[i / (kManyQueries / 2)][e] *= e % 2 == 0 ? own[e / 4].x : own[e / 4].y;
      }
    }
  }

  static __device__ __forceinline__ void add_tile(
      const Shared& shared, uint32_t index, uint32_t buffer, int half, CodedSums& sums) {
    constexpr int kSteps = 8;  // two for each piece, of two blocks of numbers each
    const int thread = static_cast<int>(threadIdx.x) % 128;
    const uint32_t values =
        shared.ring.tile(index) + values_of_lane(thread) + static_cast<uint32_t>(half) * 2048;
    uint32_t operands[2][2][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int piece = step / 2;
      const int first = step % 2 * 2;  // block
      uint32_t codes[4];
      ptx::load_matrix4_transposed(codes, values + static_cast<uint32_t>(piece) * Ring::kPiece +
                                              static_cast<uint32_t>(step % 2) * 1024);
      if (step >= 2) {
        ptx::mma_wait<1>();  // the step before the last has read its operands
      }
      uint32_t(&own)[2][4] = operands[step % 2];
      widen_values<Codes>(codes, own[0], own[1]);
      if (step % 2 == 1) {
        __syncwarp();
        if (thread % 32 == 0) {
          ptx::barrier_arrive(shared.ring.empty_of(index, static_cast<uint32_t>(piece)));
        }
      }
      const uint64_t weights =
          ptx::swizzled_descriptor(shared.weights_of(buffer) + static_cast<uint32_t>(piece) * 32);
      ptx::mma_fence();
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        ptx::mma_registers_f16<kManyQueries>(sums[first + block], own[block], weights);
      }
      ptx::mma_commit();
    }
    ptx::mma_wait<0>();
#pragma unroll
    for (int block = 0; block < kCodedBlocks; ++block) {
      ptx::pin(sums[block]);
    }
  }

  /// Gives a segment's sums of 256 numbers out, two neighbouring ones of a query together.
  static __device__ __forceinline__ void give_sums(const LatentArgs& args,
                                                   const LatentSegment& segment,
                                                   const CodedSums& sums,
                                                   int half,
                                                   int thread) {
    const int lane = thread % 32;
    const int32_t queries = segment.queries(args);
    const int dim = half * 256 + thread / 32 * 16 + lane / 4 * 2;
#pragma unroll
    for (int q = 0; q < kManyQueries / 4; ++q) {
      const int query = q / 2 * 8 + lane % 4 * 2 + q % 2;
      if (query >= queries) {
        continue;
      }
      const int at = q / 2 * 4 + q % 2;
#pragma unroll
      for (int block = 0; block < kCodedBlocks; ++block) {
        const float first = sums[block][at];
        const float second = sums[block][at + 2];
        if (segment.slot < 0) {
          *reinterpret_cast<uint32_t*>(segment.result(args, query) + dim + block * 64) =
              ptx::pack_bf16(first, second);
        } else {
          const int64_t row = int64_t{segment.slot} * args.columns + query;
          *reinterpret_cast<float2*>(args.partial_sums + row * kLatentValues + dim + block * 64) =
              make_float2(first, second);
        }
      }
    }
  }

  float log_unit_;
  float scales_[2];                            // of the lane's queries
  typename Codes::Sum sums_[kManyTokens / 2];  // of the tile that was begun
  float turned_[kManyTokens / 2];              // products of rotated parts
};

}  // namespace nibble::cuda
