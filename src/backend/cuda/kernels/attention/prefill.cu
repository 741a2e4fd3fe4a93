#include "backend/cuda/kernels/attention/kv_forms.cuh"
#include "backend/cuda/kernels/attention/launch.h"

namespace nibble::cuda {

cudaError_t prefill_attention(const AttentionLaunch& args, const LaunchContext& context) {
  const AttentionShape& shape = args.shape;
  PrefillArgs out{paged_args(args)};
  out.q_begin = args.step.q_begin;
  out.kv_len = args.step.kv_len;
  const dim3 blocks(static_cast<unsigned>(prefill_blocks(args.step.sequences, args.step.rows)),
                    static_cast<unsigned>(shape.heads));
  const int head_dim = shape.kv.head_dim;
  const bool sm90 = head_dim <= 128 && device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
  const auto launch = [&]<KvCode kCode>() {
    return sm90 ? launch_prefill_sm90<kCode>(out, head_dim, blocks, context)
                : launch_prefill<kCode>(out, head_dim, blocks, context);
  };
  return with_kv_form(shape.kv.code, launch, cudaErrorInvalidValue);
}

}  // namespace nibble::cuda
