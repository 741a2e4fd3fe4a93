// What the kernels of latent attention are told, and how their parts become results. Items that
// several blocks have shared: their results become one, in the order of the line. Which these are
// is part of a step's plan; a kernel behind the one that made their parts merges them. Its warps
// take 128 numbers of a query each; where items are few, all warps of a block share the parts of
// such.

#include <numbers>

#include "backend/cuda/kernels/latent/latent.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int kMergeBlocks = 2;  // per multiprocessor
constexpr int kMergeWarps = 8;
constexpr int kMergeThreads = 32 * kMergeWarps;
constexpr int kMergeMany = 8;  // parts of an item from which on warps share them
constexpr int kMergePieces = kLatentValues / 128;

__device__ __forceinline__ bool has_query(const LatentArgs& args,
                                          const SharedItem& item,
                                          int32_t query) {
  return item.first_query + query < item.rows * args.heads;
}
__device__ __forceinline__ int64_t place_of_part(const LatentArgs& args,
                                                 const SharedItem& item,
                                                 int32_t part,
                                                 int32_t query) {
  const int32_t slot = part == 0 ? item.first_slot : 2 * (item.first + part);
  return int64_t{slot} * args.columns + query;
}
__device__ __forceinline__ uint16_t* result_of(const LatentArgs& args,
                                               const SharedItem& item,
                                               int32_t query) {
  const int32_t at = item.first_query + query;
  return args.out + int64_t{item.row + at / args.heads} * args.out_stride +
         at % args.heads * kLatentDim;
}

/// The item within which a share begins, if no share before that one does.
__device__ __forceinline__ bool find_shared_item(const LatentArgs& args,
                                                 int32_t block,
                                                 SharedItem& item) {
  const auto* from = reinterpret_cast<const int4*>(args.plan.starts + block);
  const int4 a = __ldcg(from);      // sequence, item, tile, begin
  const int4 b = __ldcg(from + 1);  // end, blocks, total
  const int4 c = __ldcg(from + 2);  // the sequence
  const int32_t begin = a.w - a.z;
  if (a.z == 0 || share_owner(begin, b.y, b.z) != block - 1) {
    return false;
  }
  item.row = c.w;
  item.rows = __ldcg(args.q_begin + a.x + 1) - c.w;
  item.first_query = a.y * args.columns;
  item.first = block - 1;
  item.parts = share_owner(begin + c.y - 1, b.y, b.z) - item.first + 1;
  item.first_slot = 2 * item.first + (share_begin(item.first, b.y, b.z) != begin ? 1 : 0);
  return true;
}

/// Lists the shared items, in order. By one block.
__global__ __launch_bounds__(kMergeThreads) void list_shared_items(
    const __grid_constant__ LatentArgs args) {
  __shared__ int32_t counts[kMergeWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t blocks = __ldcg(&args.plan.starts->blocks);
  int32_t found = 0;
  for (int32_t start = 1; start < blocks; start += kMergeThreads) {
    const int32_t block = start + static_cast<int32_t>(threadIdx.x);
    SharedItem item{};
    const bool is_one = block < blocks && find_shared_item(args, block, item);
    const unsigned votes = __ballot_sync(~0U, is_one);
    if (lane == 0) {
      counts[threadIdx.x / 32] = __popc(votes);
    }
    __syncthreads();
    int32_t before = found;
    for (int warp = 0; warp < kMergeWarps; ++warp) {
      before += warp < static_cast<int>(threadIdx.x) / 32 ? counts[warp] : 0;
      found += counts[warp];
    }
    if (is_one) {
      args.shared->items[before + __popc(votes & ((1U << lane) - 1))] = item;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    args.shared->count = found;
    args.shared->together = blocks > kMergeMany * found ? 1 : 0;
  }
}

/// A sum of parts, in units of 2^top.
struct MergedSum {
  float4 sum;
  float top;
  float total;

  __device__ __forceinline__ void add(float4 other,
                                      float other_top,
                                      float other_total,
                                      float unit) {
    const float higher = fmaxf(top, other_top);
    const float keep = higher == -INFINITY ? 0.0F : ptx::exp2_approx((top - higher) * unit);
    const float weight = higher == -INFINITY ? 0.0F : ptx::exp2_approx((other_top - higher) * unit);
    sum.x = fmaf(other.x, weight, sum.x * keep), sum.y = fmaf(other.y, weight, sum.y * keep);
    sum.z = fmaf(other.z, weight, sum.z * keep), sum.w = fmaf(other.w, weight, sum.w * keep);
    total = fmaf(other_total, weight, total * keep);
    top = higher;
  }
};

/// Parts first, first + step, ... of one query, four numbers for each lane.
template <int kBatch>
__device__ __forceinline__ MergedSum merge_parts(
    const LatentArgs& args, const SharedItem& item, int32_t query, int dim, int2 from_step) {
  MergedSum merged{make_float4(0.0F, 0.0F, 0.0F, 0.0F), -INFINITY, 0.0F};
  for (int32_t start = from_step.x; start < item.parts; start += kBatch * from_step.y) {
    float4 sums[kBatch];
    float2 tops[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int32_t part = start + i * from_step.y;
      if (part < item.parts) {
        const int64_t at = place_of_part(args, item, part, query);
        tops[i] = __ldcg(args.partial_tops + at);
        sums[i] =
            __ldcg(reinterpret_cast<const float4*>(args.partial_sums + at * kLatentValues + dim));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (start + i * from_step.y < item.parts) {
        merged.add(sums[i], tops[i].x, tops[i].y, args.score_factor);
      }
    }
  }
  return merged;
}

__device__ __forceinline__ void give_merged(const LatentArgs& args,
                                            const SharedItem& item,
                                            int32_t query,
                                            int dim,
                                            const MergedSum& merged) {
  const float inverse = 1.0F / merged.total;
  *reinterpret_cast<uint2*>(result_of(args, item, query) + dim) =
      make_uint2(ptx::pack_bf16(merged.sum.x * inverse, merged.sum.y * inverse),
                 ptx::pack_bf16(merged.sum.z * inverse, merged.sum.w * inverse));
}

/// All warps of the block for one piece of a query.
__device__ __forceinline__ void merge_together(const LatentArgs& args,
                                               const SharedItem& item,
                                               int32_t query,
                                               int dim) {
  __shared__ MergedSum of_warps[kMergeWarps][32];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  of_warps[warp][lane] = merge_parts<9>(args, item, query, dim, make_int2(warp, kMergeWarps));
  __syncthreads();
  if (warp == 0) {
    MergedSum merged = of_warps[0][lane];
#pragma unroll
    for (int other = 1; other < kMergeWarps; ++other) {
      const MergedSum& part = of_warps[other][lane];
      merged.add(part.sum, part.top, part.total, args.score_factor);
    }
    give_merged(args, item, query, dim, merged);
  }
  __syncthreads();
}

__global__ __launch_bounds__(kMergeThreads, kMergeBlocks) void merge_latent_kernel(
    const __grid_constant__ LatentArgs args) {
  ptx::allow_successor();
  const int32_t units = __ldcg(&args.shared->count) * args.columns * kMergePieces;
  const bool together = __ldcg(&args.shared->together) != 0;
  ptx::wait_for_predecessor();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto block = static_cast<int32_t>(blockIdx.x);
  const auto grid = static_cast<int32_t>(gridDim.x);
  const int32_t step = together ? grid : grid * kMergeWarps;
  for (int32_t unit = together ? block : block * kMergeWarps + warp; unit < units; unit += step) {
    const SharedItem item = args.shared->items[unit / kMergePieces / args.columns];
    const int32_t query = unit / kMergePieces % args.columns;
    const int dim = unit % kMergePieces * 128 + lane * 4;
    if (!has_query(args, item, query)) {
      continue;
    }
    if (together) {
      merge_together(args, item, query, dim);
    } else {
      give_merged(args, item, query, dim, merge_parts<4>(args, item, query, dim, make_int2(0, 1)));
    }
  }
}

}  // namespace

LatentArgs latent_args(const LatentLaunch& launch, const LineForm& form) {
  const LatentShape& shape = launch.shape;
  LatentArgs args{};
  args.q = static_cast<const uint16_t*>(launch.q);
  args.q_stride = launch.q_stride;
  args.out = static_cast<uint16_t*>(launch.out);
  args.out_stride = launch.out_stride;
  args.pages = static_cast<const uint8_t*>(launch.pages);
  args.page_bytes = latent_page_bytes(shape);
  args.params_at = latent_params_offset(shape, 0);
  args.page_table = launch.step.page_table;
  args.page_table_stride = launch.step.page_table_stride;
  args.pieces_per_page = shape.page_size / 16;
  args.heads = shape.heads;
  args.columns = form.columns;
  args.tile_tokens = form.tile_tokens;
  args.q_begin = launch.step.q_begin;
  args.score_factor = shape.scale * std::numbers::log2e_v<float>;
  args.hint = shape.heads > form.columns ? ptx::CacheHint::kNormal : ptx::CacheHint::kEvictFirst;
  args.plan = view_plan(const_cast<void*>(launch.plan), form.blocks, launch.step.sequences,
                        launch.step.rows);
  args.shared =
      reinterpret_cast<SharedItems*>(static_cast<uint8_t*>(const_cast<void*>(launch.plan)) +
                                     round_up(args.plan.bytes, alignof(int4)));
  auto* const workspace = static_cast<uint8_t*>(launch.workspace);
  const size_t slots = size_t{2} * static_cast<size_t>(form.blocks) * form.columns;
  args.partial_sums = reinterpret_cast<float*>(workspace);
  args.partial_tops = reinterpret_cast<float2*>(workspace + slots * kLatentValues * sizeof(float));
  args.images = workspace + slots * (kLatentValues * sizeof(float) + sizeof(float2));
  args.line_items = line_items(form);
  return args;
}

cudaError_t list_shared(const LatentArgs& args, cudaStream_t stream) {
  return launch(list_shared_items, {dim3(1), kMergeThreads, 0}, {stream, false}, args);
}

cudaError_t merge_latent(const LatentArgs& args, const LaunchContext& context) {
  const int blocks = kMergeBlocks * device_attribute(cudaDevAttrMultiProcessorCount);
  return launch(merge_latent_kernel, {dim3(static_cast<unsigned>(blocks)), kMergeThreads, 0},
                {.stream = context.stream}, args);
}

}  // namespace nibble::cuda
