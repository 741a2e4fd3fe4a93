#pragma once

#include "backend/cuda/kernels/attention/plan.cuh"

namespace nibble::cuda {

struct DecodeArgs;

struct PrefillArgs : PagedArgs {
  const int32_t* q_begin;
  const int32_t* kv_len;
};

// Kernels for one form of the cache. Each is compiled in a file of its own, for build time:
// decode.cu.in, prefill.cu.in and prefill_sm90.cu.in.

template <KvCode kCode>
cudaError_t launch_decode_either(const DecodeArgs& args,
                                 const DecodeGrid& grid,
                                 int head_dim,
                                 const LaunchContext& context);

template <KvCode kCode>
cudaError_t launch_prefill(const PrefillArgs& args,
                           int head_dim,
                           dim3 blocks,
                           const LaunchContext& context);

/// head_dim 64 and 128, sm_90a.
template <KvCode kCode>
cudaError_t launch_prefill_sm90(const PrefillArgs& args,
                                int head_dim,
                                dim3 blocks,
                                const LaunchContext& context);

}  // namespace nibble::cuda
