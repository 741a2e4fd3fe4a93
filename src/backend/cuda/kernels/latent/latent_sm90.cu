// Latent attention of rows of 512 + 64 numbers, on sm_90a.

#include "backend/cuda/kernels/attention/line.h"
#include "backend/cuda/kernels/latent/few_bf16.cuh"
#include "backend/cuda/kernels/latent/few_codes.cuh"
#include "backend/cuda/kernels/latent/few_int4.cuh"
#include "backend/cuda/kernels/latent/latent_launch.h"
#include "backend/cuda/kernels/latent/many_bf16.cuh"
#include "backend/cuda/kernels/latent/many_codes.cuh"
#include "backend/cuda/kernels/latent/many_int4.cuh"

namespace nibble::cuda {
namespace {

constexpr int kImageWarps = 8;
static_assert(kFewTokens == kManyTokens);

/// Images of what the sequences on the line have as queries, a warp for each.
template <typename Queries>
__global__ __launch_bounds__(32 * kImageWarps) void query_images_sm90(
    const __grid_constant__ LatentArgs args, int32_t line_rows) {
#if __CUDA_ARCH__ >= 900
  constexpr int kQueries = Queries::kCount;
  ptx::allow_successor();
  ptx::wait_for_predecessor();  // all do, so that what comes behind waits for the same
  const auto number = static_cast<int32_t>(blockIdx.x * kImageWarps + threadIdx.x / 32);
  LatentSegment segment{};
  segment.sequence = static_cast<int32_t>(blockIdx.y);
  segment.row = __ldcg(args.q_begin + segment.sequence);
  segment.rows = __ldcg(args.q_begin + segment.sequence + 1) - segment.row;
  segment.first_query = number / kQueries * kQueries;
  if (segment.rows > line_rows || segment.first_query >= segment.rows * args.heads) {
    return;
  }
  const int64_t item = int64_t{segment.sequence} * args.line_items + segment.first_query / kQueries;
  uint8_t* const image = args.images + item * kQueryImage<Queries>;
  RawQuery raw;
  raw.load(args, segment, number % kQueries, static_cast<int>(threadIdx.x) % 32);
  Queries::store(raw, number % kQueries, image, reinterpret_cast<float*>(image + Queries::kBytes),
                 static_cast<int>(threadIdx.x) % 32);
#endif
}

cudaError_t launch_large(void (*kernel)(LatentArgs),
                         const Grid& grid,
                         const LaunchContext& context,
                         const LatentArgs& args) {
  const cudaError_t status = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes));
  return status != cudaSuccess ? status : launch(kernel, grid, context, args);
}

template <typename Form>
cudaError_t launch_few(const dim3& grid, const LatentArgs& args, const LaunchContext& context) {
  return launch_large(few_latent_sm90<Form, LatentLine>,
                      {grid, kFewThreads, FewShared<Form>::kBytes}, context, args);
}

template <typename Form, typename Work>
cudaError_t launch_many(const dim3& grid, const LatentArgs& args, const LaunchContext& context) {
  return launch_large(many_latent_sm90<Form, Work>, {grid, kManyThreads, ManyShared<Form>::kBytes},
                      context, args);
}

dim3 blocks_of(const LineForm& form) { return dim3(static_cast<unsigned>(form.blocks)); }

template <typename Queries>
cudaError_t make_images(const LineForm& form,
                        int32_t sequences,
                        const LatentArgs& args,
                        const LaunchContext& context) {
  const int32_t blocks = args.line_items * Queries::kCount / kImageWarps;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(sequences));
  return launch(query_images_sm90<Queries>, {grid, 32 * kImageWarps, 0}, context, args,
                form.line_rows);
}

/// What a step decodes with.
struct Decode {
  LineForm form;
  int32_t sequences;
  LatentArgs args;
  LaunchContext context;

  template <typename Form>
  [[nodiscard]] cudaError_t few() const {
    return behind_images<typename Form::Queries>(launch_few<Form>);
  }
  template <typename Form>
  [[nodiscard]] cudaError_t many() const {
    return behind_images<typename Form::Queries>(launch_many<Form, LatentLine>);
  }

 private:
  template <typename Queries>
  [[nodiscard]] cudaError_t behind_images(cudaError_t (*decode)(const dim3&,
                                                                const LatentArgs&,
                                                                const LaunchContext&)) const {
    LaunchContext own = context;
    if constexpr (Queries::kImages) {
      const cudaError_t status = make_images<Queries>(form, sequences, args, context);
      if (status != cudaSuccess) {
        return status;
      }
      own.overlap = true;
    }
    return decode(blocks_of(form), args, own);
  }
};

cudaError_t decode_bf16(const Decode& step) {
  switch (step.form.columns) {
    case 8:
      return step.few<FewBf16<8>>();
    case 16:
      return step.few<FewBf16<16>>();
    default:
      return step.many<ManyBf16>();
  }
}

template <typename Codes>
cudaError_t decode_coded(const Decode& step) {
  switch (step.form.columns) {
    case 8:
      return step.few<FewCodes<Codes, 8>>();
    case 16:
      return step.few<FewCodes<Codes, 16>>();
    default:
      return step.many<ManyCodes<Codes>>();
  }
}

cudaError_t decode_int4(const Decode& step) {
  switch (step.form.columns) {
    case 8:
      return step.few<FewInt4<8>>();
    case 16:
      return step.few<FewInt4<16>>();
    default:
      return step.many<ManyInt4>();
  }
}

}  // namespace

size_t latent_image_bytes(const LatentShape& shape) {
  const LineForm form = latent_line(shape);
  return static_cast<size_t>(line_items(form)) * static_cast<size_t>(form.columns) *
         (2 * kLatentDim + sizeof(float));
}

cudaError_t decode_latent_sm90(const LatentLaunch& launch, const LaunchContext& context) {
  const LineForm form = latent_line(launch.shape);
  const Decode step{form, launch.step.sequences, latent_args(launch, form), context};
  const auto decode = launch.shape.code == KvCode::kInt8   ? decode_coded<Int8Latents>
                      : launch.shape.code == KvCode::kFp8  ? decode_coded<Fp8Latents>
                      : launch.shape.code == KvCode::kInt4 ? decode_int4
                                                           : decode_bf16;
  const cudaError_t status = decode(step);
  return status != cudaSuccess ? status : merge_latent(step.args, context);
}

cudaError_t prefill_latent_sm90(const LatentLaunch& launch, const LaunchContext& context) {
  LatentArgs args = latent_args(launch, latent_line(launch.shape));
  args.columns = kManyQueries;
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
      return launch_many<ManyInt4, LatentBlock>(grid, args, context);
    default:
      return launch_many<ManyBf16, LatentBlock>(grid, args, context);
  }
}

}  // namespace nibble::cuda
