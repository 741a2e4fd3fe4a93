#pragma once

#include "backend/cuda/kernels/attention/plan.cuh"

namespace nibble::cuda {

struct DecodeArgs;
struct PrefillArgs;

// One file per format of the cache, for build time.

cudaError_t launch_decode_bf16(const DecodeArgs&, const DecodeGrid&, int, const LaunchContext&);
cudaError_t launch_decode_fp8(const DecodeArgs&, const DecodeGrid&, int, const LaunchContext&);
cudaError_t launch_decode_int8(const DecodeArgs&, const DecodeGrid&, int, const LaunchContext&);
cudaError_t launch_decode_int4(const DecodeArgs&, const DecodeGrid&, int, const LaunchContext&);

/// head_dim 64 and 128, sm_90a.
cudaError_t launch_prefill_sm90(
    const PrefillArgs&, KvCode, int head_dim, dim3, const LaunchContext&);
cudaError_t launch_prefill_sm90_fp8(const PrefillArgs&, int head_dim, dim3, const LaunchContext&);
cudaError_t launch_prefill_sm90_int8(const PrefillArgs&, int head_dim, dim3, const LaunchContext&);
cudaError_t launch_prefill_sm90_int4(const PrefillArgs&, int head_dim, dim3, const LaunchContext&);
cudaError_t launch_prefill_bf16(const PrefillArgs&, int head_dim, dim3, const LaunchContext&);
cudaError_t launch_prefill_fp8(const PrefillArgs&, int head_dim, dim3, const LaunchContext&);
cudaError_t launch_prefill_int8(const PrefillArgs&, int head_dim, dim3, const LaunchContext&);
cudaError_t launch_prefill_int4(const PrefillArgs&, int head_dim, dim3, const LaunchContext&);

}  // namespace nibble::cuda
