#pragma once

// Rows in bf16 for latent attention with many queries (many_sm90.cuh): queries are the rows of all
// products.

#include "backend/cuda/kernels/latent/many_sums.cuh"

namespace nibble::cuda {

class ManyBf16 : public FetchedAsTheyAre, public ManyNumbers<ManyBf16> {
 public:
  static constexpr int kFetchRegisters = 32;
  static constexpr int kSumRegisters = 168;
  using Ring = LatentRing<kManyTokens, 2, 4>;
  using Shared = ManyShared<ManyBf16>;
  using Queries = PlainQueries<kManyQueries>;
  static __device__ __forceinline__ uint32_t pack(float a, float b) { return ptx::pack_bf16(a, b); }
  static __device__ __forceinline__ void take_weigher_registers() { ptx::registers_take<136>(); }

  __device__ ManyBf16(const LatentArgs& /*args*/, const Shared& /*shared*/, int /*thread*/) {}

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

  static __device__ __forceinline__ void multiply_values(float (&sums)[64],
                                                         uint64_t weights,
                                                         uint64_t values) {
    ptx::mma_shared<ptx::MmaType::kBf16, 128, true>(sums, weights, values);
  }

  /// Gives a segment's sums of 256 numbers out, those of a whole item times their factors.
  static __device__ __forceinline__ void give_sums(const LatentArgs& args,
                                                   const LatentSegment& segment,
                                                   const ManySums& sums,
                                                   const float (&factors)[2],
                                                   int half) {
    const int row =
        static_cast<int>(threadIdx.x) % 128 / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
    const int column = half * 256 + static_cast<int>(threadIdx.x) % 4 * 2;
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
              ptx::pack_bf16(sums[i / 16][i % 16 * 4 + 2 * r] * factors[r],
                             sums[i / 16][i % 16 * 4 + 2 * r + 1] * factors[r]);
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
};

}  // namespace nibble::cuda
