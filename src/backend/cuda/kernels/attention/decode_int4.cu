#include "backend/cuda/kernels/attention/decode_short.cuh"
#include "backend/cuda/kernels/attention/launch.h"

namespace nibble::cuda {

cudaError_t launch_decode_int4(const DecodeArgs& args,
                               const DecodeGrid& grid,
                               int head_dim,
                               const LaunchContext& context) {
  return launch_decode_either<KvCode::kInt4>(args, grid, head_dim, context);
}

}  // namespace nibble::cuda
