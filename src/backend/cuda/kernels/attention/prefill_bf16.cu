#include "backend/cuda/kernels/attention/launch.h"
#include "backend/cuda/kernels/attention/prefill.cuh"

namespace nibble::cuda {

cudaError_t launch_prefill_bf16(const PrefillArgs& args,
                                int head_dim,
                                dim3 blocks,
                                const LaunchContext& context) {
  return launch_prefill<KvCode::kBf16>(args, head_dim, blocks, context);
}

}  // namespace nibble::cuda
