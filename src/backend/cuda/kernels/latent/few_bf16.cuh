#pragma once

// Rows in bf16 for latent attention with few queries (few_sm90.cuh).

#include "backend/cuda/kernels/latent/few_sm90.cuh"
#include "backend/cuda/ptx/wgmma_turned.cuh"

namespace nibble::cuda {

template <int kQueries>
class FewBf16 {
 public:
  static constexpr int kColumns = kQueries;
  static constexpr int kBlocks = 1;  // of a multiprocessor
  using Ring = LatentRing<kFewTokens, 2, 4>;
  using Queries = PlainQueries<kColumns>;
  static __device__ __forceinline__ int first_dim(int thread) {
    return thread / 32 * 16 + thread % 32 / 4;
  }
  static constexpr int dim_of(int block, int row) { return block * 64 + row * 8; }
  static __device__ __forceinline__ uint32_t pack(float a, float b) { return ptx::pack_bf16(a, b); }

  __device__ FewBf16(const LatentArgs& /*args*/,
                     const FewShared<FewBf16>& /*shared*/,
                     int /*thread*/) {}

  /// Scores [64 tokens, kColumns] of a tile.
  __device__ __forceinline__ void multiply(const FewShared<FewBf16>& shared,
                                           uint32_t index,
                                           int /*token*/,
                                           float (&scores)[kColumns / 2],
                                           float (&units)[2]) const {
    units[0] = units[1] = 1.0F;
#pragma unroll
    for (float& score : scores) {
      score = 0.0F;
    }
    ptx::mma_fence();
#pragma unroll
    for (int step = 0; step < kLatentDim / 16; ++step) {
      ptx::mma_shared<ptx::MmaType::kBf16, kColumns>(
          scores, LatentOperand<>::rows(shared.ring.tile(index), step),
          LatentOperand<>::rows(shared.queries, step));
    }
    ptx::mma_commit();
    ptx::mma_wait<0>();
    ptx::pin(scores);
  }

  /// Adds a tile to the sums.
  __device__ __forceinline__ void sum(const FewShared<FewBf16>& shared,
                                      uint32_t index,
                                      int thread,
                                      float (&sums)[kFewBlocks][kColumns / 2]) const {
    ptx::mma_fence();
#pragma unroll
    for (int piece = 0; piece < 4; ++piece) {
      const uint32_t at = shared.ring.tile(index) + static_cast<uint32_t>(piece) * Ring::kPiece;
      const uint64_t weights =
          ptx::swizzled_descriptor(shared.weights + static_cast<uint32_t>(piece) * 32);
#pragma unroll
      for (int block = 0; block < kFewBlocks; ++block) {
        ptx::mma_shared_turned<kColumns>(sums[block], LatentOperand<>::values(at, block), weights);
      }
      ptx::mma_commit();
    }
    release_read_parts(shared.ring, index, thread % 32);
#pragma unroll
    for (int block = 0; block < kFewBlocks; ++block) {
      ptx::pin(sums[block]);
    }
  }
};

}  // namespace nibble::cuda
