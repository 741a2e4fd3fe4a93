#pragma once

// Rows in bf16 for latent attention with many queries (many_sm90.cuh): queries are the rows of all
// products.

#include "backend/cuda/kernels/latent/many_sm90.cuh"

namespace nibble::cuda {

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

class ManyBf16 {
 public:
  static constexpr uint32_t kWeightBuffers = 1;
  static constexpr int kTokenLines = 1;  // none are used
  static constexpr bool kAhead = false;
  static constexpr int kFetchRegisters = 32;
  static constexpr int kSumRegisters = 168;
  using Ring = LatentRing<kManyTokens, 2, 4>;
  using Shared = ManyShared<ManyBf16>;
  using Queries = PlainQueries<kManyQueries>;
  static __device__ __forceinline__ uint32_t pack(float a, float b) { return ptx::pack_bf16(a, b); }
  static __device__ __forceinline__ void take_weigher_registers() { ptx::registers_take<136>(); }

  __device__ ManyBf16(const LatentArgs& /*args*/, const Shared& /*shared*/, int /*thread*/) {}

  __device__ __forceinline__ void begin(const Shared& /*shared*/,
                                        uint32_t /*index*/,
                                        int /*thread*/) const {}

  /// Scores of a tile: queries by rows.
  __device__ __forceinline__ void finish(const Shared& shared,
                                         uint32_t index,
                                         int /*thread*/,
                                         ManyScores& scores) const {
#pragma unroll
    for (float& score : scores) {
      score = 0.0F;
    }
    ptx::pin(scores);
    ptx::mma_fence();
#pragma unroll
    for (int step = 0; step < kLatentDim / 16; ++step) {
      ptx::mma_shared<ptx::MmaType::kBf16, kManyTokens>(
          scores, LatentOperand<>::rows(shared.queries, step),
          LatentOperand<>::rows(shared.ring.tile(index), step));
    }
    ptx::mma_commit();
    ptx::mma_wait<0>();
    ptx::pin(scores);
  }

  /// What weight e of the lane counts in totals.
  __device__ __forceinline__ float unit(const Shared& /*shared*/,
                                        uint32_t /*index*/,
                                        int /*thread*/,
                                        int /*e*/) const {
    return 1.0F;
  }

  /// A warpgroup that sums values: numbers 256 half..+255.
  template <typename Work>
  static __device__ __forceinline__ void sum_segments(const LatentArgs& args,
                                                      const Shared& shared,
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
        ptx::group_sync(weights_full(0), kWeightThreads);
        const float first = shared.factors[row];
        const float second = shared.factors[row + 8];
        if (__any_sync(~0U, first != 1.0F || second != 1.0F)) {
          scale_sums(sums, first, second);
        }
        add_tile(shared, index, half, lane, sums);
        ptx::group_arrive(weights_empty(0), kWeightThreads);
      }
      ptx::group_sync(weights_full(0), kWeightThreads);
      const float first = shared.factors[row];
      const float second = shared.factors[row + 8];
      ptx::group_arrive(weights_empty(0), kWeightThreads);
      scale_sums(sums, first, second);
      give_sums(args, segment, sums, row, half * 256 + lane % 4 * 2);
    }
  }

 private:
  static __device__ __forceinline__ void add_tile(
      const Shared& shared, uint32_t index, int half, int lane, ManySums& sums) {
    ptx::mma_fence();
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      const uint32_t at = shared.ring.tile(index) + static_cast<uint32_t>(piece) * Ring::kPiece;
      const uint32_t weights = shared.weights + static_cast<uint32_t>(piece) * 32;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::mma_shared<ptx::MmaType::kBf16, 128, true>(
            sums[i], ptx::swizzled_descriptor(weights),
            LatentOperand<>::values(at, half * 4 + i * 2));
      }
      ptx::mma_commit();
    }
    release_read_parts(shared.ring, index, lane);
    ptx::pin(sums[0]);
    ptx::pin(sums[1]);
  }
};

}  // namespace nibble::cuda
