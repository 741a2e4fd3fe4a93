// Latent attention of rows of 512 + 64 numbers, on sm_90a.

#include "backend/cuda/kernels/attention/line.h"
#include "backend/cuda/kernels/latent/few_bf16.cuh"
#include "backend/cuda/kernels/latent/few_codes.cuh"
#include "backend/cuda/kernels/latent/few_int4.cuh"
#include "backend/cuda/kernels/latent/latent_launch.h"
#include "backend/cuda/kernels/latent/many_bf16.cuh"
#include "backend/cuda/kernels/latent/many_codes.cuh"

namespace nibble::cuda {
namespace {

constexpr int kPrefillInt4 = 16;  // queries of an item of prefill over rows in 4 bits
static_assert(kFewTokens == kManyTokens);

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
  return launch_large(few_latent_sm90<Form, Work>, {grid, kFewThreads, FewShared<Form>::kBytes},
                      context, args);
}

template <typename Form, typename Work>
cudaError_t launch_many(const dim3& grid, const LatentArgs& args, const LaunchContext& context) {
  return launch_large(many_latent_sm90<Form, Work>, {grid, kManyThreads, ManyShared<Form>::kBytes},
                      context, args);
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

}  // namespace

cudaError_t decode_latent_sm90(const LatentLaunch& launch, const LaunchContext& context) {
  const LineForm form = latent_line(launch.shape);
  const LatentArgs args = latent_args(launch, form);
  const auto decode = launch.shape.code == KvCode::kInt8   ? decode_coded<Int8Latents>
                      : launch.shape.code == KvCode::kFp8  ? decode_coded<Fp8Latents>
                      : launch.shape.code == KvCode::kInt4 ? decode_int4
                                                           : decode_bf16;
  const cudaError_t status = decode(args, form, context);
  return status != cudaSuccess ? status : merge_latent(args, context);
}

cudaError_t prefill_latent_sm90(const LatentLaunch& launch, const LaunchContext& context) {
  LatentArgs args = latent_args(launch, latent_line(launch.shape));
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
