// Latent attention of rows of 512 + 64 numbers, on sm_90a.

#include <algorithm>
#include <numbers>

#include "backend/cuda/kernels/attention/line.h"
#include "backend/cuda/kernels/latent/few_sm90.cuh"
#include "backend/cuda/kernels/latent/latent_launch.h"
#include "backend/cuda/kernels/latent/many_sm90.cuh"
#include "backend/cuda/kernels/latent/merge.cuh"

namespace nibble::cuda {
namespace {

constexpr int kMergeBlocks = 2;  // per multiprocessor

LatentArgs latent_args(const LatentLaunch& launch) {
  const LatentShape& shape = launch.shape;
  const LineForm form = latent_line(shape);
  LatentArgs args{};
  args.q = static_cast<const uint16_t*>(launch.q);
  args.q_stride = launch.q_stride;
  args.out = static_cast<uint16_t*>(launch.out);
  args.out_stride = launch.out_stride;
  args.pages = static_cast<const uint8_t*>(launch.pages);
  args.page_bytes = latent_page_bytes(shape);
  args.page_table = launch.step.page_table;
  args.page_table_stride = launch.step.page_table_stride;
  args.pieces_per_page = shape.page_size / 16;
  args.heads = shape.heads;
  args.columns = form.columns;
  args.tile_tokens = form.tile_tokens;
  args.q_begin = launch.step.q_begin;
  args.score_factor = shape.scale * std::numbers::log2e_v<float>;
  args.hint = shape.heads > kManyQueries ? ptx::CacheHint::kNormal : ptx::CacheHint::kEvictFirst;
  args.plan = view_plan(const_cast<void*>(launch.plan), form.blocks, launch.step.sequences,
                        launch.step.rows);
  auto* const workspace = static_cast<uint8_t*>(launch.workspace);
  const size_t slots = size_t{2} * static_cast<size_t>(form.blocks) * form.columns;
  args.partial_sums = reinterpret_cast<float*>(workspace);
  args.partial_tops = reinterpret_cast<float2*>(workspace + slots * kLatentValues * sizeof(float));
  return args;
}

cudaError_t launch_large(void (*kernel)(LatentArgs),
                         const Grid& grid,
                         const LaunchContext& context,
                         const LatentArgs& args) {
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
  return status != cudaSuccess ? status : launch(kernel, grid, context, args);
}

}  // namespace

size_t latent_workspace_sm90(const LatentShape& shape) {
  const LineForm form = latent_line(shape);
  return size_t{2} * static_cast<size_t>(form.blocks) * static_cast<size_t>(form.columns) *
         (kLatentValues * sizeof(float) + sizeof(float2));
}

cudaError_t decode_latent_sm90(const LatentLaunch& launch, const LaunchContext& context) {
  const LatentArgs args = latent_args(launch);
  const LineForm form = latent_line(launch.shape);
  const auto blocks = static_cast<unsigned>(form.blocks);
  cudaError_t status = cudaSuccess;
  switch (form.columns) {
    case 8:
      status = launch_large(few_latent_kernel<8>, {dim3(blocks), kFewThreads, FewShared<8>::kBytes},
                            context, args);
      break;
    case 16:
      status = launch_large(few_latent_kernel<16>,
                            {dim3(blocks), kFewThreads, FewShared<16>::kBytes}, context, args);
      break;
    default:
      status = launch_large(many_latent_kernel<LatentLine>,
                            {dim3(blocks), kManyThreads, kManyShared}, context, args);
  }
  if (status != cudaSuccess) {
    return status;
  }
  return cuda::launch(merge_latent_kernel, {dim3(kMergeBlocks * blocks), kMergeThreads, 0},
                      {.stream = context.stream}, args);
}

cudaError_t prefill_latent_sm90(const LatentLaunch& launch, const LaunchContext& context) {
  LatentArgs args = latent_args(launch);
  args.columns = kManyQueries;
  args.tile_tokens = kManyTokens;
  args.hint = ptx::CacheHint::kNormal;
  const int64_t blocks = prefill_blocks(launch.step.sequences, launch.step.rows);
  const int32_t items = (kPrefillRows * args.heads + kManyQueries - 1) / kManyQueries;
  const Grid grid{dim3(static_cast<unsigned>(items), static_cast<unsigned>(blocks)), kManyThreads,
                  kManyShared};
  return launch_large(many_latent_kernel<LatentBlock>, grid, context, args);
}

}  // namespace nibble::cuda
