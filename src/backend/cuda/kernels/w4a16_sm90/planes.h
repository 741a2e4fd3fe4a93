#pragma once

#include <cstdint>

#include "backend/cuda/kernels/w4a16_sm90/few.h"

namespace nibble::cuda {

/// Most tokens that the kernels of w4a16_sm90/planes.cuh take.
inline constexpr int kW4A16PlanesTokens = 2;

/// How the blocks share the rows of the weights, and each block's warps its tile of them. The
/// blocks of a cluster share K. In a block, row_warps times 2^k_shift warps have two slices each
/// and a part of K.
struct W4A16PlanesPlan {
  int slices = 0;       // of 16 rows
  int tiles = 0;        // of slices
  int tile = 0;         // slices of the largest
  int tile_slices = 0;  // of the last; the first `larger_tiles` have one more
  int larger_tiles = 0;
  int cluster_shift = 0;  // clusters of 2^this blocks
  int blocks = 0;         // 0: the activations leave too little shared memory to the weights
  int row_warps = 0;
  int k_shift = 0;
  int step_shift = 0;  // a stage of the ring holds 2^this pairs, of 128 of K; at most k_shift
  int stages = 0;
  int pair_bytes = 0;    // of a stage's pair: whole lines that hold the largest tile's weights
  int weight_bytes = 0;  // of a stage
  int x_bytes = 0;       // planes and scales of all activations of a block
  int shared_bytes = 0;
};

using W4A16PlanesArgs = W4A16FewArgs<W4A16PlanesPlan>;

/// The best plan for m tokens on `sms` multiprocessors, for groups of 32 or 128.
[[nodiscard]] W4A16PlanesPlan plan_w4a16_planes(
    int64_t n, int64_t k, int group_size, int64_t m, int sms);

/// Products of very few tokens with weights of one shape in the layout of Int4GroupLayout.
class W4A16Planes {
 public:
  static Result<W4A16Planes> make(const GemmProblem& problem, const DeviceInfo& device);
  /// Whether run() takes m tokens.
  [[nodiscard]] bool takes(int64_t m) const;
  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const;

 private:
  int64_t n_ = 0, k_ = 0;
  int group_size_ = 0;
  W4A16PlanesPlan plans_[kW4A16PlanesTokens + 1];  // for each number of tokens
};

using W4A16PlanesKernel = void (*)(W4A16PlanesArgs args);

/// The instance for 1 or 2 tokens.
template <int kGroupSize>
[[nodiscard]] W4A16PlanesKernel w4a16_planes_kernel(int tokens);

/// Their threads: warps that multiply, and one that copies.
inline constexpr int kW4A16PlanesWarps = 16;
inline constexpr unsigned kW4A16PlanesThreads = 32 * (kW4A16PlanesWarps + 1);

/// What memory is read in.
inline constexpr int kW4A16LineBytes = 128;

/// Bytes of 128 of K of a token: three planes, and twice three numbers that scale them, in words of
/// four.
inline constexpr int kW4A16PlaneBytes = 3 * 128;
inline constexpr int kW4A16RecordBytes = kW4A16PlaneBytes + 32;

/// Shared memory of a block: never so little that a multiprocessor takes two
/// (w4a16_sm90/decode.h says why). Of it neither ring nor activations: sums of the warps and
/// of the cluster's other block, 64 bytes for each of their slices and tokens, and barriers of up
/// to 32 stages.
inline constexpr int kW4A16PlanesMostShared = 229376;
inline constexpr int kW4A16PlanesLeastShared = 118784;
inline constexpr int kW4A16PlanesStages = 32;
[[nodiscard]] constexpr int w4a16_planes_rest(int tokens) {
  return (2 * kW4A16PlanesWarps + kW4A16PlanesWarps / 2) * tokens * 64 + 16 * kW4A16PlanesStages +
         16 + 128;
}

}  // namespace nibble::cuda
