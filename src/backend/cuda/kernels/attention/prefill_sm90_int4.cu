#include "backend/cuda/kernels/attention/launch.h"
#include "backend/cuda/kernels/attention/prefill_sm90.cuh"

namespace nibble::cuda {

cudaError_t launch_prefill_sm90_int4(const PrefillArgs& args,
                                     int head_dim,
                                     dim3 blocks,
                                     const LaunchContext& context) {
  return launch_prefill_sm90_code<KvCode::kInt4>(args, head_dim, blocks, context);
}

}  // namespace nibble::cuda
