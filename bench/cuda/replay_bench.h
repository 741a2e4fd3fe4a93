#pragma once

#include <cuda_runtime_api.h>

#include "base/status.h"
#include "bench/kernels/cuda_bench.h"

namespace nibble::cuda {

/// Issues the work on its backend's stream once, records it there as a graph, and times replays of
/// that, which the GPU has in full before it begins; where the work is to be issued anew, that,
/// from its first kernel to the end of its last. Fails where a kernel fails, or recording does.
Result<CudaReplays> time_replays(int device, const CudaReplayWork& work, cudaStream_t stream);

}  // namespace nibble::cuda
