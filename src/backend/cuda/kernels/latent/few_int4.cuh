#pragma once

// Rows in 4 bits for latent attention with few queries (few_sm90.cuh). Codes become fp16 in
// registers, times their group's scale plus its offset, as the operands of 64 rows of all products:
// tokens by numbers for scores, numbers by tokens for values. Queries are fp16.

#include "backend/cuda/kernels/latent/few_sm90.cuh"
#include "backend/cuda/kernels/latent/int4.cuh"

namespace nibble::cuda {

template <int kQueries>
class FewInt4 {
 public:
  static constexpr int kColumns = kQueries;
  static constexpr int kBlocks = 2;  // of a multiprocessor
  using Ring = LatentRing<kFewTokens, 3, 4, Int4Rows>;
  using Shared = FewShared<FewInt4>;
  using Queries = ScaledQueries<kColumns>;
  static __device__ __forceinline__ int first_dim(int thread) {
    return thread / 32 * 32 + thread % 32 / 4 * 4;
  }
  static constexpr int dim_of(int block, int row) {
    return block / 2 * kInt4Group + block % 2 * 2 + row;
  }
  static __device__ __forceinline__ uint32_t pack(float a, float b) { return ptx::pack_f16(a, b); }

  __device__ FewInt4(const LatentArgs& /*args*/, const Shared& shared, int thread)
      : values_(values_of_lane<Int4Rows>(thread)), rows_(rows_of_lane(thread)) {
    load_query_scales(shared, thread, scales_);
  }

  /// Scores [64 tokens, kColumns] of a tile.
  __device__ __forceinline__ void multiply(const Shared& shared,
                                           uint32_t index,
                                           int token,
                                           float (&scores)[kColumns / 2],
                                           float (&units)[2]) const {
    units[0] = units[1] = 1.0F;
#pragma unroll
    for (float& score : scores) {
      score = 0.0F;
    }
    ptx::pin(scores);
    const uint32_t tile = shared.ring.tile(index);
    const uint32_t params = shared.ring.params(index) + static_cast<uint32_t>(16 * token);
    const uint4 first = ptx::load_shared16(params);
    const uint4 second = ptx::load_shared16(params + 16 * 8);
    const uint32_t lines[2][kGroups] = {{first.x, first.y, first.z, first.w},
                                        {second.x, second.y, second.z, second.w}};
    ptx::mma_fence();
#pragma unroll
    for (int step = 0; step < kRopeSteps; ++step) {
      ptx::mma_shared<ptx::MmaType::kBf16, kColumns>(
          scores, Operand::rows(tile, kLatentValues / 2 / 32 + step),
          QueryRope::rows(shared.queries + Queries::kRope, step));
    }
    ptx::mma_commit();
    uint32_t operands[2][4][4];
#pragma unroll
    for (int pair = 0; pair < kLatentValues / (2 * kInt4Chunk); ++pair) {  // of chunks
      if (pair >= 2) {
        ptx::mma_wait<1>();  // the pair before the last has read its operands
      }
      uint32_t codes[4];  // of two rows, in each of two chunks
      ptx::load_matrix4(codes, chunks(tile + rows_, pair));
      uint32_t(&own)[4][4] = operands[pair % 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t line = lines[i % 2][pair * 2 * kInt4Chunk / kInt4Group];
        uint32_t pairs[4];
        widen_int4(codes[i], ptx::low_twice(line), ptx::high_twice(line), pairs);
        own[i / 2 * 2][i % 2] = pairs[0];
        own[i / 2 * 2][i % 2 + 2] = pairs[1];
        own[i / 2 * 2 + 1][i % 2] = pairs[2];
        own[i / 2 * 2 + 1][i % 2 + 2] = pairs[3];
      }
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::pin(own[step]);
      }
      ptx::mma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        ptx::mma_registers_f16<kColumns>(scores, own[step],
                                         QueryRows::rows(shared.queries, pair * 4 + step));
      }
      ptx::mma_commit();
    }
    ptx::mma_wait<0>();
    ptx::pin(scores);
#pragma unroll
    for (int e = 0; e < kColumns / 2; ++e) {
      scores[e] *= scales_[e / 4 * 2 + e % 2];
    }
  }

  /// Adds a tile to the sums.
  __device__ __forceinline__ void sum(const Shared& shared,
                                      uint32_t index,
                                      int thread,
                                      float (&sums)[kFewBlocks][kColumns / 2]) const {
    uint32_t operands[2][4][4];
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const int piece = step / 2;
      const int column = step % 2;  // of 256 numbers, in four products
      if (step >= 2) {
        ptx::mma_wait<1>();  // the step before the last has read its operands
      }
      uint32_t codes[4];
      ptx::load_matrix4_transposed(codes, shared.ring.tile(index) +
                                              static_cast<uint32_t>(piece) * Ring::kPiece +
                                              values_ + static_cast<uint32_t>(column) * 1024);
      uint32_t(&own)[4][4] = operands[step % 2];
      const uint32_t params = shared.ring.params(index) + static_cast<uint32_t>(piece) * 256 +
                              static_cast<uint32_t>(thread % 4 * 32 + column * 8);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // tokens 2 t and the next, and 8 further
        const uint2 even = ptx::load_shared8(params + static_cast<uint32_t>(half) * 128);
        const uint2 odd = ptx::load_shared8(params + static_cast<uint32_t>(half) * 128 + 16);
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          const uint32_t a = group == 0 ? even.x : even.y;
          const uint32_t b = group == 0 ? odd.x : odd.y;
          uint32_t pairs[4];
          widen_int4(codes[group * 2 + half], __byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632),
                     pairs);
          own[group * 2][half * 2] = pairs[0];
          own[group * 2][half * 2 + 1] = pairs[1];
          own[group * 2 + 1][half * 2] = pairs[2];
          own[group * 2 + 1][half * 2 + 1] = pairs[3];
        }
      }
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        ptx::pin(own[block]);
      }
      __syncwarp();
      if (column == 1 && thread % 32 == 0) {
        ptx::barrier_arrive(shared.ring.empty_of(index, static_cast<uint32_t>(piece)));
      }
      const uint64_t weights =
          ptx::swizzled_descriptor(shared.weights + static_cast<uint32_t>(piece) * 32);
      ptx::mma_fence();
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        ptx::mma_registers_f16<kColumns>(sums[column * 4 + block], own[block], weights);
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
  static constexpr int kGroups = kLatentValues / kInt4Group;
  using Operand = LatentOperand<static_cast<int>(Int4Rows::kGroup / 16)>;
  using QueryRows = LatentOperand<kLatentValues>;

  /// Where a lane reads codes for scores: of its warp's 16 rows, two neighbouring chunks.
  static __device__ __forceinline__ uint32_t rows_of_lane(int thread) {
    const int lane = thread % 32;
    const int row = lane % 8;
    return static_cast<uint32_t>(thread / 32) * Ring::kPiece +
           static_cast<uint32_t>(lane / 8 % 2) * Int4Rows::kGroup +
           static_cast<uint32_t>(row * 128 + ((lane / 16) ^ row) * 16);
  }
  /// Chunks 2 pair and the next, of an address that has those of pair 0.
  static __device__ __forceinline__ uint32_t chunks(uint32_t first, int pair) {
    return (first ^ static_cast<uint32_t>(pair % 4 * 32)) + static_cast<uint32_t>(pair / 4) * 1024;
  }

  uint32_t values_;
  uint32_t rows_;
  float scales_[kColumns / 4];  // of the lane's queries
};

}  // namespace nibble::cuda
