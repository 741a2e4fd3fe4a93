// RMS and layer norm of f32 rows, picked by an index or in order, rounded for the next product.
// One block owns a row and reads it once; wide rows (above 32768) are read from the cache again.

#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

template <int kPieces, GemmInput::Kind kKind, RowScales kScales>
__global__ __launch_bounds__(kMaxRowThreads) void norm_kernel(const NormArgs args) {
  constexpr bool kLayer = kKind == GemmInput::Kind::kLayerNorm;
  constexpr int kKept = kPieces > 0 ? kPieces : 1;
  constexpr bool kEarly = kPieces == 1 || kPieces == 2;  // weights fit in registers beside the row
  F32x8 weight[kKept] = {};
  if constexpr (kEarly) {
    for_each_piece<kPieces>(
        args.n, [&](int p, int64_t i) { weight[p] = load_f32x8(args.norm.norm_weight + i); });
  }
  const BitsOf<kPieces, kScales> bits(args.out.blocks, args.n);
  ptx::allow_successor();
  ptx::wait_for_predecessor();

  const int64_t row = blockIdx.x;
  const int64_t source = args.row_index != nullptr ? args.row_index[row] : row;
  const float* x = args.x + source * args.n;
  F32x8 kept[kKept];
  float sum = 0.0F;
  for_each_piece<kPieces>(args.n, [&](int p, int64_t i) {
    kept[p] = load_f32x8(x + i);
#pragma unroll
    for (const float value : kept[p].v) {
      sum = kLayer ? sum + value : fmaf(value, value, sum);
    }
  });
  __shared__ float shared[32];
  sum = sum_of_block(sum, shared);
  float centre = 0.0F;
  const auto centred = [&](int p, int64_t i) {
    F32x8 y = kPieces > 0 ? kept[p] : load_f32x8(x + i);
    if constexpr (kLayer) {
#pragma unroll
      for (float& value : y.v) {
        value = __fsub_rn(value, centre);
      }
    }
    return y;
  };
  if constexpr (kLayer) {
    centre = sum / static_cast<float>(args.n);
    sum = 0.0F;
    for_each_piece<kPieces>(args.n, [&](int p, int64_t i) {
      for (const float value : centred(p, i).v) {
        sum = fmaf(value, value, sum);
      }
    });
    __shared__ float squares[32];
    sum = sum_of_block(sum, squares);
  }
  const float mean = sum / static_cast<float>(args.n);
  const float factor = 1.0F / sqrtf(mean + args.norm.eps);

  const auto normalized = [&](int p, int64_t i) {
    F32x8 y = centred(p, i);
    const F32x8 w = kEarly ? weight[p] : load_f32x8(args.norm.norm_weight + i);
    if constexpr (kLayer) {
      const F32x8 bias = load_f32x8(args.norm.norm_bias + i);
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        y.v[j] = __fmaf_rn(__fmul_rn(y.v[j], factor), w.v[j], bias.v[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        y.v[j] = y.v[j] * factor * w.v[j];
      }
    }
    return y;
  };
  if (kScales == RowScales::kOne && args.out.format == ActFormat::kBf16) {
    auto* out = static_cast<__nv_bfloat16*>(args.out.values) + row * args.n;
    for_each_piece<kPieces>(args.n,
                            [&](int p, int64_t i) { store_bf16x8(out + i, normalized(p, i)); });
  } else {
    store_scaled<kPieces, kScales>(args.out, bits, row, args.n, normalized);
  }
}

template <GemmInput::Kind kKind, RowScales kScales>
cudaError_t launch_kernel(const NormArgs& args, const LaunchContext& context) {
  static constexpr void (*kKernels[4])(NormArgs) = {
      norm_kernel<0, kKind, kScales>, norm_kernel<1, kKind, kScales>,
      norm_kernel<2, kKind, kScales>, norm_kernel<4, kKind, kScales>};
  return launch_rows(kKernels, args, context);
}

template <GemmInput::Kind kKind>
cudaError_t launch_norm(const NormArgs& args, const LaunchContext& context) {
  switch (scales_of(args.out.format)) {
    case RowScales::kGroups:
      return launch_kernel<kKind, RowScales::kGroups>(args, context);
    case RowScales::kBlocks:
      return launch_kernel<kKind, RowScales::kBlocks>(args, context);
    default:
      return launch_kernel<kKind, RowScales::kOne>(args, context);
  }
}

}  // namespace

cudaError_t norm_quantize(const NormArgs& args, const LaunchContext& context) {
  if (!can_store(args.out, args.rows, args.n)) {
    return cudaErrorInvalidValue;
  }
  switch (args.norm.kind) {
    case GemmInput::Kind::kRmsNorm:
      return launch_norm<GemmInput::Kind::kRmsNorm>(args, context);
    case GemmInput::Kind::kLayerNorm:
      return launch_norm<GemmInput::Kind::kLayerNorm>(args, context);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
