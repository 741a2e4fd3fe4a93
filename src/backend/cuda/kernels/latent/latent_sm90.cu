// Latent attention of rows of 512 + 64 numbers, on sm_90a.

#include <algorithm>
#include <numbers>

#include "backend/cuda/kernels/attention/line.h"
#include "backend/cuda/kernels/latent/few_bf16.cuh"
#include "backend/cuda/kernels/latent/few_codes.cuh"
#include "backend/cuda/kernels/latent/few_int4.cuh"
#include "backend/cuda/kernels/latent/latent_launch.h"
#include "backend/cuda/kernels/latent/many_bf16.cuh"
#include "backend/cuda/kernels/latent/many_codes.cuh"
#include "backend/cuda/kernels/latent/merge.cuh"

namespace nibble::cuda {
namespace {

constexpr int kMergeBlocks = 2;   // per multiprocessor
constexpr int kPrefillInt4 = 16;  // queries of an item of prefill over rows in 4 bits
static_assert(kFewTokens == kManyTokens);

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

template <typename Form, typename Work = LatentLine>
cudaError_t launch_few(const dim3& grid, const LatentArgs& args, const LaunchContext& context) {
  return launch_large(few_latent_kernel<Form, Work>, {grid, kFewThreads, FewShared<Form>::kBytes},
                      context, args);
}

template <typename Form, typename Work>
cudaError_t launch_many(const dim3& grid, const LatentArgs& args, const LaunchContext& context) {
  return launch_large(many_latent_kernel<Form, Work>,
                      {grid, kManyThreads, ManyShared<Form>::kBytes}, context, args);
}

dim3 blocks_of(const LineForm& form) { return dim3(static_cast<unsigned>(form.blocks)); }

cudaError_t decode_bf16(const LatentArgs& args,
                        const LineForm& form,
                        const LaunchContext& context) {
  switch (form.columns) {
    case 8:
      return launch_few<FewBf16<8>>(blocks_of(form), args, context);
    case 16:
      return launch_few<FewBf16<16>>(blocks_of(form), args, context);
    default:
      return launch_many<ManyBf16, LatentLine>(blocks_of(form), args, context);
  }
}

template <typename Codes>
cudaError_t decode_coded(const LatentArgs& args,
                         const LineForm& form,
                         const LaunchContext& context) {
  switch (form.columns) {
    case 8:
      return launch_few<FewCodes<Codes, 8>>(blocks_of(form), args, context);
    case 16:
      return launch_few<FewCodes<Codes, 16>>(blocks_of(form), args, context);
    default:
      return launch_many<ManyCodes<Codes>, LatentLine>(blocks_of(form), args, context);
  }
}

cudaError_t decode_int4(const LatentArgs& args,
                        const LineForm& form,
                        const LaunchContext& context) {
  return form.columns == 8 ? launch_few<FewInt4<8>>(blocks_of(form), args, context)
                           : launch_few<FewInt4<16>>(blocks_of(form), args, context);
}

int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

}  // namespace

size_t latent_workspace_sm90(const LatentShape& shape) {
  const LineForm form = latent_line(shape);
  return size_t{2} * static_cast<size_t>(form.blocks) * static_cast<size_t>(form.columns) *
         (kLatentValues * sizeof(float) + sizeof(float2));
}

cudaError_t decode_latent_sm90(const LatentLaunch& launch, const LaunchContext& context) {
  const LatentArgs args = latent_args(launch);
  const LineForm form = latent_line(launch.shape);
  const auto decode = launch.shape.code == KvCode::kInt8   ? decode_coded<Int8Latents>
                      : launch.shape.code == KvCode::kFp8  ? decode_coded<Fp8Latents>
                      : launch.shape.code == KvCode::kInt4 ? decode_int4
                                                           : decode_bf16;
  const cudaError_t status = decode(args, form, context);
  if (status != cudaSuccess) {
    return status;
  }
  const auto merges = static_cast<unsigned>(kMergeBlocks * multiprocessors());
  return cuda::launch(merge_latent_kernel, {dim3(merges), kMergeThreads, 0},
                      {.stream = context.stream}, args);
}

cudaError_t prefill_latent_sm90(const LatentLaunch& launch, const LaunchContext& context) {
  LatentArgs args = latent_args(launch);
  args.columns = launch.shape.code == KvCode::kInt4 ? kPrefillInt4 : kManyQueries;
  args.tile_tokens = kManyTokens;
  args.hint = ptx::CacheHint::kNormal;
  const int64_t blocks = prefill_blocks(launch.step.sequences, launch.step.rows);
  const int32_t items = (kPrefillRows * args.heads + args.columns - 1) / args.columns;
  const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>(blocks));
  switch (launch.shape.code) {
    case KvCode::kInt8:
      return launch_many<ManyCodes<Int8Latents>, LatentBlock>(grid, args, context);
    case KvCode::kFp8:
      return launch_many<ManyCodes<Fp8Latents>, LatentBlock>(grid, args, context);
    case KvCode::kInt4:
      return launch_few<FewInt4<kPrefillInt4>, LatentBlock>(grid, args, context);
    default:
      return launch_many<ManyBf16, LatentBlock>(grid, args, context);
  }
}

}  // namespace nibble::cuda
