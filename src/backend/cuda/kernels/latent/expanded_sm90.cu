// Attention over expanded keys and values on sm_90a.

#include <algorithm>
#include <numbers>

#include "backend/cuda/kernels/latent/expanded_sm90.cuh"

namespace nibble::cuda {
namespace {

constexpr int64_t kCached = int64_t{24} << 20;  // bytes of keys and values that blocks share

/// Heads whose blocks run at a time: their keys and values stay in the second cache.
int32_t heads_together(const ExpandedLaunch& launch) {
  const int64_t of_head = int64_t{launch.piece->tokens} * (kExpandedNope + kExpandedValue) * 2;
  return static_cast<int32_t>(std::clamp<int64_t>(kCached / of_head, 1, launch.heads));
}

}  // namespace

cudaError_t attend_expanded(const ExpandedLaunch& launch, const LaunchContext& context) {
  if (launch.piece->blocks == 0) {
    return cudaSuccess;
  }
  ExpandedArgs args{};
  args.maps = *launch.maps;
  args.piece = *launch.piece;
  args.q = static_cast<const uint16_t*>(launch.q);
  args.q_stride = launch.q_stride;
  args.rotated = static_cast<const uint16_t*>(launch.rotated) + launch.row_dim - kExpandedRope;
  args.rotated_head = launch.row_dim;
  args.state = static_cast<float*>(launch.state);
  args.state_head = launch.row_dim / 2;
  args.out = static_cast<uint16_t*>(launch.out);
  args.heads = launch.heads;
  args.head_group = heads_together(launch);
  args.score_factor = launch.scale * std::numbers::log2e_v<float>;
  const cudaError_t status = cudaFuncSetAttribute(
      expanded_sm90_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, ExpandedShared::kBytes);
  if (status != cudaSuccess) {
    return status;
  }
  const auto blocks = static_cast<unsigned>(launch.piece->blocks * launch.heads);
  return cuda::launch(expanded_sm90_kernel,
                      {dim3(blocks), kExpandedThreads, ExpandedShared::kBytes}, context, args);
}

}  // namespace nibble::cuda
