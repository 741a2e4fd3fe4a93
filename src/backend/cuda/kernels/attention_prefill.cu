#include "backend/cuda/kernels/attention_launch.h"
#include "backend/cuda/kernels/attention_prefill.cuh"

namespace nibble::cuda {

cudaError_t prefill_attention(const AttentionLaunch& args, const LaunchContext& context) {
  const AttentionShape& shape = args.shape;
  PrefillArgs out{};
  out.q = static_cast<const uint16_t*>(args.q);
  out.q_stride = args.q_stride;
  out.out = static_cast<uint16_t*>(args.out);
  out.out_stride = args.out_stride;
  out.pages = static_cast<const uint8_t*>(args.pages);
  out.page_bytes = page_bytes(shape.kv);
  out.q_begin = args.step.q_begin;
  out.kv_len = args.step.kv_len;
  out.page_table = args.step.page_table;
  out.page_table_stride = args.step.page_table_stride;
  out.tiles_per_page = shape.kv.page_size / kv_tile_tokens(shape.kv.code);
  out.kv_heads = shape.kv.kv_heads;
  out.ratio = shape.heads / shape.kv.kv_heads;
  out.window = shape.sliding_window;
  out.score_factor = score_factor(shape);
  out.value_factor = shape.kv.code == KvCode::kFp8 ? shape.v_scale : 1.0F;
  out.plan = view_plan(const_cast<void*>(args.plan), decode_grid(shape).blocks, args.step.sequences,
                       args.step.rows);
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
