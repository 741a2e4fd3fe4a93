#include <bit>
#include <optional>

#include "backend/cuda/kernels/attention/launch.h"
#include "backend/cuda/kernels/attention/ring.cuh"

namespace nibble::cuda {
namespace {

size_t partial_floats(const DecodeGrid& grid, int head_dim) {
  return size_t{2} * static_cast<size_t>(grid.blocks) * static_cast<size_t>(grid.columns) *
         static_cast<size_t>(head_dim);
}

/// Rounds of blocks that have a KV head of a sequence each: with more of them a plan, which cuts
/// long sequences, is worth its time.
constexpr int64_t kMostWaves = 2;

/// Clusters of attention/decode_short.cuh: of so many blocks, as log2; none where it is not worth
/// it. It appends, and so cannot code a group of keys.
std::optional<int32_t> short_cluster(const AttentionShape& shape, const StepMetadata& step) {
  const DecodeGrid grid = decode_grid(shape);
  const bool fits = step.longest <= kShortAttention && grid.columns == 8 &&
                    shape.kv.head_dim <= 128 && !kv_has_residual(shape.kv.code);
  if (!fits || device_attribute(cudaDevAttrComputeCapabilityMajor) < 9) {
    return std::nullopt;
  }
  const int64_t clusters = int64_t{step.sequences} * shape.kv.kv_heads * grid.groups;
  // Clusters all run at once. Of large ones a part of the GPU whose multiprocessors are no multiple
  // of them leaves some idle; small ones leave a long sequence among short ones to few blocks.
  for (const int32_t log2 : {3, 2}) {
    if ((clusters << log2) * 4 <= grid.blocks * 3) {
      return log2;
    }
  }
  for (const int32_t log2 : {1, 0}) {
    const int64_t most = log2 == 0 ? kMostWaves * int64_t{grid.blocks} : grid.blocks;
    if (step.longest <= kShorterAttention && clusters << log2 <= most) {
      return log2;
    }
  }
  return std::nullopt;
}

}  // namespace

size_t attention_workspace_bytes(const AttentionShape& shape) {
  const DecodeGrid grid = decode_grid(shape);
  const auto blocks = static_cast<size_t>(grid.blocks);
  // Arrivals come first: they must be zero.
  return blocks * 16 + 2 * blocks * static_cast<size_t>(grid.columns) * sizeof(float2) +
         partial_floats(grid, shape.kv.head_dim) * sizeof(float);
}

bool decode_reads_plan(const AttentionShape& shape, const StepMetadata& step) {
  return !short_cluster(shape, step).has_value();
}

namespace {

cudaError_t decode(const AttentionLaunch& args,
                   const AppendArgs& append,
                   const LaunchContext& context) {
  const AttentionShape& shape = args.shape;
  DecodeGrid grid = decode_grid(shape);
  const std::optional<int32_t> cluster = short_cluster(shape, args.step);
  grid.short_blocks =
      cluster ? args.step.sequences * shape.kv.kv_heads * grid.groups << *cluster : 0;
  grid.many_items =
      int64_t{args.step.sequences} * shape.kv.kv_heads * grid.groups >= grid.blocks * kManyItems;
  const auto per_page = static_cast<uint32_t>(shape.kv.page_size / kv_tile_tokens(shape.kv.code));
  DecodeArgs out{paged_args(args)};
  out.append = append;
  out.cluster_shift = cluster.value_or(0);
  out.tiles_shift = std::has_single_bit(per_page) ? std::countr_zero(per_page) : -1;
  out.groups = grid.groups;
  out.q_begin = args.step.q_begin;
  out.kv_len = args.step.kv_len;
  out.stages = grid.stages;
  auto* workspace = static_cast<uint8_t*>(args.workspace);
  const auto blocks = static_cast<size_t>(grid.blocks);
  out.arrivals = reinterpret_cast<uint32_t*>(workspace);
  out.partial_tops = reinterpret_cast<float2*>(workspace + blocks * 16);
  out.partial_sums =
      reinterpret_cast<float*>(out.partial_tops + 2 * blocks * static_cast<size_t>(grid.columns));
  const auto launch = [&]<KvCode kCode>() {
    return launch_decode_either<kCode>(out, grid, shape.kv.head_dim, context);
  };
  return with_kv_form(shape.kv.code, launch, cudaErrorInvalidValue);
}

}  // namespace

cudaError_t decode_attention(const AttentionLaunch& args, const LaunchContext& context) {
  return decode(args, {}, context);
}

cudaError_t append_decode_attention(const RopeAppendLaunch& append,
                                    const AttentionLaunch& args,
                                    const LaunchContext& context) {
  return decode_reads_plan(args.shape, args.step) ? cudaErrorInvalidValue
                                                  : decode(args, append_args(append), context);
}

}  // namespace nibble::cuda
