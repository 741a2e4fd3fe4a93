#include <bit>

#include "backend/cuda/kernels/attention_decode.cuh"
#include "backend/cuda/kernels/attention_launch.h"

namespace nibble::cuda {
namespace {

size_t partial_floats(const DecodeGrid& grid, int head_dim) {
  return size_t{2} * static_cast<size_t>(grid.blocks) * static_cast<size_t>(grid.columns) *
         static_cast<size_t>(head_dim);
}

}  // namespace

size_t attention_workspace_bytes(const AttentionShape& shape) {
  const DecodeGrid grid = decode_grid(shape);
  const auto blocks = static_cast<size_t>(grid.blocks);
  // Arrivals come first: they must be zero.
  return blocks * 16 + 2 * blocks * static_cast<size_t>(grid.columns) * sizeof(float2) +
         partial_floats(grid, shape.kv.head_dim) * sizeof(float);
}

cudaError_t decode_attention(const AttentionLaunch& args, const LaunchContext& context) {
  const AttentionShape& shape = args.shape;
  const DecodeGrid grid = decode_grid(shape);
  const int32_t per_page = shape.kv.page_size / kv_tile_tokens(shape.kv.code);
  DecodeArgs out{};
  out.q = static_cast<const uint16_t*>(args.q);
  out.q_stride = args.q_stride;
  out.out = static_cast<uint16_t*>(args.out);
  out.out_stride = args.out_stride;
  out.pages = static_cast<const uint8_t*>(args.pages);
  out.page_bytes = page_bytes(shape.kv);
  out.page_table = args.step.page_table;
  out.page_table_stride = args.step.page_table_stride;
  out.tiles_per_page = per_page;
  out.tiles_shift = std::has_single_bit(static_cast<uint32_t>(per_page))
                        ? std::countr_zero(static_cast<uint32_t>(per_page))
                        : -1;
  out.kv_heads = shape.kv.kv_heads;
  out.ratio = shape.heads / shape.kv.kv_heads;
  out.groups = grid.groups;
  out.window = shape.sliding_window;
  out.stages = grid.stages;
  out.score_factor = score_factor(shape);
  out.value_factor = shape.kv.code == KvCode::kFp8 ? shape.v_scale : 1.0F;
  out.plan =
      view_plan(const_cast<void*>(args.plan), grid.blocks, args.step.sequences, args.step.rows);
  auto* workspace = static_cast<uint8_t*>(args.workspace);
  const auto blocks = static_cast<size_t>(grid.blocks);
  out.arrivals = reinterpret_cast<uint32_t*>(workspace);
  out.partial_tops = reinterpret_cast<float2*>(workspace + blocks * 16);
  out.partial_sums =
      reinterpret_cast<float*>(out.partial_tops + 2 * blocks * static_cast<size_t>(grid.columns));
  switch (shape.kv.code) {
    case KvCode::kBf16:
      return launch_decode_bf16(out, grid, shape.kv.head_dim, context);
    case KvCode::kFp8:
      return launch_decode_fp8(out, grid, shape.kv.head_dim, context);
    case KvCode::kInt8:
      return launch_decode_int8(out, grid, shape.kv.head_dim, context);
    case KvCode::kInt4:
      return launch_decode_int4(out, grid, shape.kv.head_dim, context);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
