#include "backend/cuda/kernels/attention/launch.h"
#include "backend/cuda/kernels/attention/prefill.cuh"

namespace nibble::cuda {

cudaError_t launch_prefill_fp8(const PrefillArgs& args,
                               int head_dim,
                               dim3 blocks,
                               const LaunchContext& context) {
  return launch_prefill<KvCode::kFp8>(args, head_dim, blocks, context);
}

}  // namespace nibble::cuda
