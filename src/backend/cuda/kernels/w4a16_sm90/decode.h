#pragma once

#include <cstdint>

#include "backend/cuda/kernels/w4a16_sm90/few.h"

namespace nibble::cuda {

/// Most tokens that the kernels of w4a16_sm90/decode.cuh take.
inline constexpr int kW4A16DecodeTokens = 16;

/// How the blocks share the rows of the weights, and each block's warps its tile of them. The
/// two blocks of a cluster share K. In a block, row_warps warps have two slices each, for k_warps
/// parts of K.
struct W4A16DecodePlan {
  int slices = 0;             // of 16 rows
  int tiles = 0, tile = 0;    // tiles that share them equally, slices of the largest
  int least = 0, larger = 0;  // slices of a tile, the first so many tiles with one more
  int cluster = 1, blocks = 0;
  int row_warps = 0, k_warps = 0, warps = 0;
  int step_pairs = 0;                   // of 128 of K, in a stage of the ring; divides k_warps
  int sets = 0;                         // of warps that take stages in turn: k_warps / step_pairs
  int stages = 0;                       // at least sets
  int weights_at = 0, stage_bytes = 0;  // of a stage
  int set_bytes = 0, ring_bytes = 0;    // of a stage for each set, of all stages
};

using W4A16DecodeArgs = W4A16FewArgs<W4A16DecodePlan>;

/// The best plan for m tokens on `sms` multiprocessors, for groups of 32 or 128.
[[nodiscard]] W4A16DecodePlan plan_w4a16_decode(
    int64_t n, int64_t k, int group_size, int64_t m, int sms);

/// Products of few tokens with weights of one shape in the layout of Int4GroupLayout.
class W4A16Decode {
 public:
  static Result<W4A16Decode> make(const GemmProblem& problem, const DeviceInfo& device);
  cudaError_t run(const GemmLaunch& args, const LaunchContext& context) const;

 private:
  int64_t n_ = 0, k_ = 0;
  int group_size_ = 0, sms_ = 0;
};

using W4A16DecodeKernel = void (*)(W4A16DecodeArgs args);

/// Instances for up to 8 and up to 16 tokens.
inline constexpr int kW4A16DecodeSizes[] = {8, 16};
template <int kGroupSize>
[[nodiscard]] W4A16DecodeKernel w4a16_decode_kernel(int tokens);

/// Most warps that multiply; after them come one that copies weights and one that loads
/// activations.
inline constexpr int kW4A16DecodeWarps = 16;
[[nodiscard]] constexpr unsigned w4a16_decode_threads(int warps) {
  return 32U * static_cast<unsigned>(warps + 2);
}
inline constexpr int kW4A16DecodeMostTile = 16;  // slices

/// Shared memory of a block: one fills a multiprocessor. Where two fit, both may be given to the
/// same launch behind a kernel that ends unevenly, and others stay idle: models took a quarter
/// longer. Of it what is no ring: sums of the warps and of the cluster's other block, 512 bytes for
/// each of their slices and eight tokens, and barriers of up to 32 stages.
inline constexpr int kW4A16DecodeShared = 231424;
inline constexpr int kW4A16DecodeStages = 32;
[[nodiscard]] constexpr int w4a16_decode_rest(int tokens, int warps) {
  return (2 * warps + kW4A16DecodeMostTile / 2) * (tokens / 8) * 512 + 16 * kW4A16DecodeStages +
         16 + 1024;
}

}  // namespace nibble::cuda
