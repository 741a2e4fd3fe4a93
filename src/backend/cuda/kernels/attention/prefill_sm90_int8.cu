#include "backend/cuda/kernels/attention/launch.h"
#include "backend/cuda/kernels/attention/prefill_sm90.cuh"

namespace nibble::cuda {

cudaError_t launch_prefill_sm90_int8(const PrefillArgs& args,
                                     int head_dim,
                                     dim3 blocks,
                                     const LaunchContext& context) {
  return launch_prefill_sm90_code<KvCode::kInt8>(args, head_dim, blocks, context);
}

}  // namespace nibble::cuda
