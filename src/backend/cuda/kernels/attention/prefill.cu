#include "backend/cuda/kernels/attention/launch.h"
#include "backend/cuda/kernels/attention/prefill.cuh"

namespace nibble::cuda {

cudaError_t prefill_attention(const AttentionLaunch& args, const LaunchContext& context) {
  const AttentionShape& shape = args.shape;
  PrefillArgs out{paged_args(args)};
  out.q_begin = args.step.q_begin;
  out.kv_len = args.step.kv_len;
  const dim3 blocks(static_cast<unsigned>(prefill_blocks(args.step.sequences, args.step.rows)),
                    static_cast<unsigned>(shape.heads));
  if (shape.kv.head_dim <= 128 && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9) {
    return launch_prefill_sm90(out, shape.kv.code, shape.kv.head_dim, blocks, context);
  }
  switch (shape.kv.code) {
    case KvCode::kBf16:
      return launch_prefill_bf16(out, shape.kv.head_dim, blocks, context);
    case KvCode::kFp8:
      return launch_prefill_fp8(out, shape.kv.head_dim, blocks, context);
    case KvCode::kInt8:
      return launch_prefill_int8(out, shape.kv.head_dim, blocks, context);
    case KvCode::kInt4:
      return launch_prefill_int4(out, shape.kv.head_dim, blocks, context);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
