// Which kernels serve latent attention, and its plans.

#include <algorithm>

#include "backend/cuda/kernels/attention/plan.cuh"
#include "backend/cuda/kernels/latent/latent.cuh"
#include "backend/cuda/kernels/latent/latent_launch.h"
#include "base/math.h"

namespace nibble::cuda {
namespace {

constexpr int32_t kFastDim = 576;     // of rows that kernels of warpgroup products read
constexpr int32_t kFastRopeDim = 64;  // of which are the rotated key, where rows have codes
constexpr int32_t kFastValues = kFastDim - kFastRopeDim;
constexpr int32_t kLineQueries = 256;  // of a sequence that share the work on it among blocks

constexpr int kFp8Capability = 89;

}  // namespace

LatentFamily latent_family(const LatentShape& shape) {
  if (shape.row_dim != kFastDim || (shape.coded() && shape.rope_dim != kFastRopeDim)) {
    return LatentFamily::kPlain;
  }
  if (compute_capability() / 10 == 9 && shape.kernels == LatentKernels::kBest) {
    return LatentFamily::kWarpgroups;
  }
  return shape.coded() ? LatentFamily::kPlain : LatentFamily::kWarps;
}

LineForm latent_line(const LatentShape& shape) {
  LineForm form;
  form.ratio = shape.heads;
  if (latent_family(shape) == LatentFamily::kWarps) {
    form.columns = 16;
    form.line_rows = std::clamp(kLineQueries / shape.heads, 1, 4);
    form.tile_tokens = 32;
    form.blocks = std::min(device_attribute(cudaDevAttrMultiProcessorCount), kMostBlocks);
    return form;
  }
  form.columns = shape.heads <= 8 ? 8 : shape.heads <= 16 ? 16 : 64;
  form.line_rows = std::clamp(kLineQueries / shape.heads, 1, form.columns < 64 ? 4 : 16);
  form.tile_tokens = 64;
  const int32_t of_each = shape.coded() && form.columns < 64 ? 2 : 1;  // blocks of a multiprocessor
  form.blocks = std::min(of_each * device_attribute(cudaDevAttrMultiProcessorCount), kMostBlocks);
  return form;
}

Status check_latent(const LatentShape& shape) {
  const auto refuse = [](std::string_view what, int64_t value, std::string_view remedy) {
    return make_error(StatusCode::kInvalidArgument, "latent attention on the GPU: {} is {}; {}",
                      what, value, remedy);
  };
  if (shape.coded() && (shape.rope_dim <= 0 || shape.rope_dim % 8 != 0 || shape.rank() % 8 != 0)) {
    return refuse("the rotated key of rows in codes must have a multiple of 8 numbers; theirs",
                  shape.rope_dim, "use --kv-cache-dtype bf16");
  }
  if (shape.code == KvCode::kInt4 && latent_family(shape) != LatentFamily::kWarpgroups) {
    return refuse(
        "a cache in int4 has kernels for rows of 512 + 64 numbers on Hopper alone; theirs",
        shape.row_dim, "use --kv-cache-dtype int8");
  }
  if (shape.code == KvCode::kFp8 && compute_capability() < kFp8Capability) {
    return refuse("a cache in fp8 needs a compute capability of 8.9; this one, times ten,",
                  compute_capability(), "use --kv-cache-dtype int8");
  }
  if (shape.row_dim <= 0 || shape.row_dim > kMostLatentDim || shape.row_dim % 8 != 0) {
    return refuse("rows of the cache must have a multiple of 8 numbers, at most 1024; theirs",
                  shape.row_dim, "use --device cpu");
  }
  if (shape.heads <= 0 || shape.heads > 1024) {
    return refuse("there may be at most 1024 heads; their number", shape.heads, "use --device cpu");
  }
  if (shape.page_size <= 0 || shape.page_size % 16 != 0) {
    return refuse("pages must hold a multiple of 16 tokens; theirs", shape.page_size,
                  "choose another --block-size");
  }
  return {};
}

size_t latent_plan_bytes(const LatentShape& shape, int32_t max_sequences, int32_t max_rows) {
  return round_up(view_plan(nullptr, latent_line(shape).blocks, max_sequences, max_rows).bytes,
                  alignof(int4)) +
         sizeof(SharedItems);
}

cudaError_t plan_latent(const LatentShape& shape,
                        const StepMetadata& step,
                        void* plan,
                        const LaunchContext& context) {
  if (latent_family(shape) == LatentFamily::kPlain) {
    return cudaSuccess;
  }
  const LineForm form = latent_line(shape);
  const cudaError_t status = plan_line(form, step, plan, context);
  const LatentLaunch launch{.shape = shape, .step = step, .plan = plan};
  return status != cudaSuccess ? status : list_shared(latent_args(launch, form), context.stream);
}

size_t latent_workspace_bytes(const LatentShape& shape, int32_t max_sequences) {
  if (latent_family(shape) == LatentFamily::kPlain) {
    return 0;
  }
  const LineForm form = latent_line(shape);
  const size_t parts = size_t{2} * static_cast<size_t>(form.blocks) *
                       static_cast<size_t>(form.columns) *
                       (kFastValues * sizeof(float) + sizeof(float2));
  return parts +
         (shape.coded() ? static_cast<size_t>(max_sequences) * latent_image_bytes(shape) : 0);
}

cudaError_t decode_latent(const LatentLaunch& args, const LaunchContext& context) {
  switch (latent_family(args.shape)) {
    case LatentFamily::kWarpgroups:
      return decode_latent_sm90(args, context);
    case LatentFamily::kWarps:
      return decode_latent_warps(args, context);
    case LatentFamily::kPlain:
      break;
  }
  return plain_latent(args, context);
}

cudaError_t prefill_latent(const LatentLaunch& args, const LaunchContext& context) {
  switch (latent_family(args.shape)) {
    case LatentFamily::kWarpgroups:
      return prefill_latent_sm90(args, context);
    case LatentFamily::kWarps:
      return prefill_latent_warps(args, context);
    case LatentFamily::kPlain:
      break;
  }
  return cudaSuccess;  // the plain kernel has done all rows
}

}  // namespace nibble::cuda
