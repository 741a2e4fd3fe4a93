// bf16 rows rounded to int8 or e4m3 per row or per 128 of it, or copied side by side, and f32
// numbers rounded to bf16 in place.

#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kFlatThreads = 256;

template <int kPieces, RowScales kScales>
__global__ __launch_bounds__(kMaxRowThreads) void quantize_kernel(const QuantizeRowsArgs args) {
  const BitsOf<kPieces, kScales> bits(args.out.blocks, args.n);
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t row = blockIdx.x;
  const auto* x = static_cast<const __nv_bfloat16*>(args.x) + row * args.stride;
  store_scaled<kPieces, kScales>(args.out, bits, row, args.n,
                                 [&](int, int64_t i) { return load_bf16x8(x + i); });
}

template <RowScales kScales>
cudaError_t launch_quantize(const QuantizeRowsArgs& args, const LaunchContext& context) {
  static constexpr void (*kKernels[4])(QuantizeRowsArgs) = {
      quantize_kernel<0, kScales>, quantize_kernel<1, kScales>, quantize_kernel<2, kScales>,
      quantize_kernel<4, kScales>};
  return launch_rows(kKernels, args, context);
}

// A copy of the driver's would do, but the kernel behind it could not begin before it ended.
__global__ __launch_bounds__(kFlatThreads) void copy_kernel(const QuantizeRowsArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t pieces = args.n / kPiece;  // of a row
  const int64_t piece = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x;
  const int64_t row = piece / pieces;
  if (row < args.rows) {
    const auto* from = static_cast<const __nv_bfloat16*>(args.x) + row * args.stride;
    static_cast<uint4*>(args.out.values)[piece] =
        reinterpret_cast<const uint4*>(from)[piece % pieces];
  }
}

cudaError_t copy_rows(const QuantizeRowsArgs& args, const LaunchContext& context) {
  const int64_t blocks = (args.rows * (args.n / kPiece) + kFlatThreads - 1) / kFlatThreads;
  if (blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  const Grid grid{.blocks = dim3(static_cast<unsigned>(blocks)), .threads = kFlatThreads};
  return args.rows == 0 ? cudaSuccess : launch(copy_kernel, grid, context, args);
}

__global__ __launch_bounds__(kFlatThreads) void round_bf16_kernel(float* x, int64_t count) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t first = (int64_t{blockIdx.x} * kFlatThreads + threadIdx.x) * 4;
  if (first + 4 <= count) {
    float4 v = *reinterpret_cast<const float4*>(x + first);
    v.x = __bfloat162float(__float2bfloat16_rn(v.x));
    v.y = __bfloat162float(__float2bfloat16_rn(v.y));
    v.z = __bfloat162float(__float2bfloat16_rn(v.z));
    v.w = __bfloat162float(__float2bfloat16_rn(v.w));
    *reinterpret_cast<float4*>(x + first) = v;
    return;
  }
  for (int64_t i = first; i < count; ++i) {
    x[i] = __bfloat162float(__float2bfloat16_rn(x[i]));
  }
}

}  // namespace

cudaError_t quantize_rows(const QuantizeRowsArgs& given, const LaunchContext& context) {
  QuantizeRowsArgs args = given;
  args.stride = args.stride != 0 ? args.stride : args.n;
  if (!can_store(args.out, args.rows, args.n) || args.stride % kPiece != 0) {
    return cudaErrorInvalidValue;
  }
  if (args.out.format == ActFormat::kBf16) {
    return copy_rows(args, context);
  }
  switch (scales_of(args.out.format)) {
    case RowScales::kGroups:
      return launch_quantize<RowScales::kGroups>(args, context);
    case RowScales::kBlocks:
      return launch_quantize<RowScales::kBlocks>(args, context);
    default:
      return launch_quantize<RowScales::kOne>(args, context);
  }
}

cudaError_t round_bf16(float* x, int64_t count, const LaunchContext& context) {
  const int64_t blocks = (count + 4 * kFlatThreads - 1) / (4 * kFlatThreads);
  if (count < 0 || blocks > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (count == 0) {
    return cudaSuccess;
  }
  const Grid grid{.blocks = dim3(static_cast<unsigned>(blocks)), .threads = kFlatThreads};
  return launch(round_bf16_kernel, grid, context, x, count);
}

}  // namespace nibble::cuda
