// silu(gate) * up of bf16 rows, rounded for the next matrix product. The token forms need a row's
// largest value, so one block owns a row; bf16 needs none and spreads over the whole GPU.

#include "backend/cuda/kernels/row_common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kFlatThreads = 256;

__device__ __forceinline__ F32x8 silu_mul_piece(const __nv_bfloat16* gate_up,
                                                int64_t n,
                                                int64_t i) {
  const F32x8 gate = load_bf16x8(gate_up + i);
  F32x8 y = load_bf16x8(gate_up + n + i);
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    // The fast forms are within 2e-6 where silu is not vanishing: far below a step of bf16.
    y.v[j] = __fdividef(gate.v[j], 1.0F + __expf(-gate.v[j])) * y.v[j];
  }
  return y;
}

template <int kPieces>
__global__ __launch_bounds__(kMaxRowThreads) void silu_mul_kernel(const SiluMulArgs args) {
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  const int64_t row = blockIdx.x;
  const auto* gate_up = static_cast<const __nv_bfloat16*>(args.gate_up) + row * args.stride;
  store_row<kPieces>(args.out, row, args.n,
                     [&](int, int64_t i) { return silu_mul_piece(gate_up, args.n, i); });
}

__global__ __launch_bounds__(kFlatThreads) void silu_mul_flat_kernel(const SiluMulArgs args) {
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  const int64_t pieces = args.n / kPiece;
  const int64_t index = int64_t{blockIdx.x} * kFlatThreads + threadIdx.x;
  if (index >= args.rows * pieces) {
    return;
  }
  const int64_t row = index / pieces;
  const int64_t i = (index - row * pieces) * kPiece;
  const auto* gate_up = static_cast<const __nv_bfloat16*>(args.gate_up) + row * args.stride;
  auto* out = static_cast<__nv_bfloat16*>(args.out.values) + row * args.n;
  store_bf16x8(out + i, silu_mul_piece(gate_up, args.n, i));
}

}  // namespace

cudaError_t silu_mul_quantize(const SiluMulArgs& given, const LaunchContext& context) {
  SiluMulArgs args = given;
  args.stride = args.stride != 0 ? args.stride : 2 * args.n;
  if (!can_store(args.out, args.rows, args.n) || args.stride % kPiece != 0) {
    return cudaErrorInvalidValue;
  }
  if (args.out.format == ActFormat::kBf16 && args.rows > 0) {
    const int64_t blocks = (args.rows * (args.n / kPiece) + kFlatThreads - 1) / kFlatThreads;
    if (blocks > INT32_MAX) {
      return cudaErrorInvalidValue;
    }
    const Grid grid{.blocks = dim3(static_cast<unsigned>(blocks)), .threads = kFlatThreads};
    return launch(silu_mul_flat_kernel, grid, context, args);
  }
  static constexpr void (*kKernels[4])(SiluMulArgs) = {silu_mul_kernel<0>, silu_mul_kernel<1>,
                                                       silu_mul_kernel<2>, silu_mul_kernel<4>};
  return launch_rows(kKernels, args, context);
}

}  // namespace nibble::cuda
