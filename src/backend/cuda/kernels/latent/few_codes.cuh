#pragma once

// Rows in 8 bits for latent attention with few queries (few_sm90.cuh). Two blocks share a
// multiprocessor, so that one multiplies while the other makes weights.

#include "backend/cuda/kernels/latent/codes.cuh"
#include "backend/cuda/kernels/latent/few_sm90.cuh"

namespace nibble::cuda {

template <typename Codes, int kQueries>
class FewCodes {
 public:
  static constexpr int kColumns = kQueries;
  static constexpr int kBlocks = 2;  // of a multiprocessor
  using Ring = LatentRing<kFewTokens, 2, 4, CodedRows>;
  using Shared = FewShared<FewCodes>;
  using Queries = CodedQueries<Codes, kColumns>;
  static __device__ __forceinline__ int first_dim(int thread) {
    return thread / 32 * 16 + thread % 32 / 4 * 2;
  }
  static constexpr int dim_of(int block, int row) { return block * 64 + row; }
  static __device__ __forceinline__ uint32_t pack(float a, float b) { return ptx::pack_f16(a, b); }

  __device__ FewCodes(const LatentArgs& args, const Shared& shared, int thread)
      : values_(values_of_lane(thread)), log_unit_(1.0F / args.score_factor) {
    load_query_scales(shared, thread, scales_);
  }

  /// Scores [64 tokens, kColumns] of a tile, with the logarithms of the tokens' scales.
  __device__ __forceinline__ void multiply(const Shared& shared,
                                           uint32_t index,
                                           int token,
                                           float (&scores)[kColumns / 2],
                                           float (&units)[2]) const {
    const uint32_t tile = shared.ring.tile(index);
    typename Codes::Sum sums[kColumns];  // of high codes, then of low ones
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      sums[i] = 0;
      scores[i / 2] = 0.0F;
    }
    ptx::pin(sums);  // zeros are there before the first product
    ptx::pin(scores);
    ptx::mma_fence();
#pragma unroll
    for (int step = 0; step < kCodeSteps; ++step) {
      ptx::mma_shared<Codes::kType, 2 * kColumns>(sums, CodedOperand::rows(tile, step),
                                                  QueryCodes::rows(shared.queries, step));
    }
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      ptx::mma_shared<ptx::MmaType::kBf16, kColumns>(
          scores, CodedOperand::rows(tile, kCodeSteps + step),
          QueryRope::rows(shared.queries + Queries::kRope, step));
    }
    ptx::mma_commit();
    float scale[2];
    float shift[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = row_scale(shared.ring.params(index) + static_cast<uint32_t>(4 * (token + 8 * r)));
      shift[r] = __log2f(scale[r]) * log_unit_;
      units[r] = __fdividef(1.0F, scale[r]);
    }
    ptx::mma_wait<0>();
    ptx::pin(sums);
    ptx::pin(scores);
#pragma unroll
    for (int e = 0; e < kColumns / 2; ++e) {
      const auto product = Codes::raise(sums[e]) + sums[kColumns / 2 + e];
      scores[e] = fmaf(static_cast<float>(product), scales_[e / 4 * 2 + e % 2] * scale[e >> 1 & 1],
                       scores[e] + shift[e >> 1 & 1]);
    }
  }

  /// Adds a tile to the sums.
  __device__ __forceinline__ void sum(const Shared& shared,
                                      uint32_t index,
                                      int thread,
                                      float (&sums)[kFewBlocks][kColumns / 2]) const {
    uint32_t operands[2][kHalf][4];
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const int piece = step / 2;
      const int first = step % 2 * kHalf;  // block
      if (step >= 2) {
        ptx::mma_wait<1>();  // the step before the last has read its operands
      }
      const uint32_t at = shared.ring.tile(index) + static_cast<uint32_t>(piece) * Ring::kPiece +
                          values_ + static_cast<uint32_t>(first) * 512;
      uint32_t(&own)[kHalf][4] = operands[step % 2];
#pragma unroll
      for (int block = 0; block < kHalf; block += 2) {
        uint32_t codes[4];
        ptx::load_matrix4_transposed(codes, at + static_cast<uint32_t>(block) * 512);
        widen_values<Codes>(codes, own[block], own[block + 1]);
      }
      __syncwarp();
      if (first > 0 && thread % 32 == 0) {
        ptx::barrier_arrive(shared.ring.empty_of(index, static_cast<uint32_t>(piece)));
      }
      const uint64_t weights =
          ptx::swizzled_descriptor(shared.weights + static_cast<uint32_t>(piece) * 32);
      ptx::mma_fence();
#pragma unroll
      for (int block = 0; block < kHalf; ++block) {
        ptx::mma_registers_f16<kColumns>(sums[first + block], own[block], weights);
      }
      ptx::mma_commit();
    }
    ptx::mma_wait<0>();
#pragma unroll
    for (int block = 0; block < kFewBlocks; ++block) {
      ptx::pin(sums[block]);
    }
  }

 private:
  static constexpr int kHalf = kFewBlocks / 2;  // blocks of a group of products

  uint32_t values_;
  float log_unit_;
  float scales_[kColumns / 4];  // of the lane's queries
};

}  // namespace nibble::cuda
