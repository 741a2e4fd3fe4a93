#include "backend/cuda/kernels/attention_launch.h"
#include "backend/cuda/kernels/attention_prefill_sm90.cuh"

namespace nibble::cuda {

cudaError_t launch_prefill_sm90(const PrefillArgs& args,
                                int head_dim,
                                dim3 blocks,
                                const LaunchContext& context) {
  return head_dim == 64 ? launch_prefill_sm90_kernel<64>(args, blocks, context)
                        : launch_prefill_sm90_kernel<128>(args, blocks, context);
}

}  // namespace nibble::cuda
