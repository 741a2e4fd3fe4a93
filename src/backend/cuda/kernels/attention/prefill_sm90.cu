#include "backend/cuda/kernels/attention/launch.h"
#include "backend/cuda/kernels/attention/prefill_sm90.cuh"

namespace nibble::cuda {

cudaError_t launch_prefill_sm90(
    const PrefillArgs& args, KvCode code, int head_dim, dim3 blocks, const LaunchContext& context) {
  switch (code) {
    case KvCode::kBf16:
      return launch_prefill_sm90_code<KvCode::kBf16>(args, head_dim, blocks, context);
    case KvCode::kFp8:
      return launch_prefill_sm90_fp8(args, head_dim, blocks, context);
    case KvCode::kInt8:
      return launch_prefill_sm90_int8(args, head_dim, blocks, context);
    case KvCode::kInt4:
      return launch_prefill_sm90_int4(args, head_dim, blocks, context);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
