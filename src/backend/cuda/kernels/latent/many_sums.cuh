#pragma once

// Sums of values for latent attention with many queries (many_sm90.cuh) whose rows lie in shared
// memory as operands of 16 bits: queries are the rows of the products, numbers of values their
// columns.

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

/// Adds a tile's values, numbers 256 half..+255, times its weights.
template <typename Form>
__device__ __forceinline__ void add_values(
    const ManyShared<Form>& shared, uint32_t index, int half, int lane, ManySums& sums) {
  ptx::mma_fence();
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    const uint32_t at = shared.ring.tile(index) + static_cast<uint32_t>(piece) * Form::Ring::kPiece;
    const uint32_t weights = shared.weights + static_cast<uint32_t>(piece) * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Form::multiply_values(sums[i], ptx::swizzled_descriptor(weights),
                            LatentOperand<>::values(at, half * 4 + i * 2));
    }
    ptx::mma_commit();
  }
  release_read_parts(shared.ring, index, lane);
  ptx::pin(sums[0]);
  ptx::pin(sums[1]);
}

/// A warpgroup that sums values: numbers 256 half..+255 of all segments.
template <typename Form, typename Work>
__device__ __forceinline__ void sum_values(const LatentArgs& args,
                                           const ManyShared<Form>& shared,
                                           int half) {
  static_assert(Form::kWeightBuffers == 1);
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
      add_values(shared, index, half, lane, sums);
      ptx::group_arrive(weights_empty(0), kWeightThreads);
    }
    ptx::group_sync(weights_full(0), kWeightThreads);
    const float factors[2] = {shared.factors[row], shared.factors[row + 8]};
    ptx::group_arrive(weights_empty(0), kWeightThreads);
    Form::give_sums(args, segment, sums, factors, half);
  }
}

/// What such forms have in common.
template <typename Form>
struct ManyNumbers {
  using Shared = ManyShared<Form>;
  static constexpr uint32_t kWeightBuffers = 1;
  static constexpr int kTokenLines = 1;  // none are used
  static constexpr bool kAhead = false;

  __device__ __forceinline__ void begin(const Shared& /*shared*/,
                                        uint32_t /*index*/,
                                        int /*thread*/) const {}
  /// What weight e of the lane counts in totals.
  __device__ __forceinline__ float unit(const Shared& /*shared*/,
                                        uint32_t /*index*/,
                                        int /*thread*/,
                                        int /*e*/) const {
    return 1.0F;
  }
  template <typename Work>
  static __device__ __forceinline__ void sum_segments(const LatentArgs& args,
                                                      const Shared& shared,
                                                      int half) {
    sum_values<Form, Work>(args, shared, half);
  }
};

}  // namespace nibble::cuda
