// A step's inputs: rows of the embedding table, and of a table of positions that is added to them,
// and the tokens that the step before it sampled.

#include <cuda_fp16.h>

#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ F32x8 load_table_piece(const __half* p) {
  const uint4 words = *reinterpret_cast<const uint4*>(p);
  const auto* halves = reinterpret_cast<const __half*>(&words);
  F32x8 out;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    out.v[i] = __half2float(halves[i]);
  }
  return out;
}

__device__ __forceinline__ F32x8 load_table_piece(const __nv_bfloat16* p) { return load_bf16x8(p); }

__device__ __forceinline__ F32x8 load_table_piece(const float* p) { return load_f32x8(p); }

/// Blocks of kThreads pieces (x) of a row (y).
template <typename Element>
__global__ __launch_bounds__(kThreads) void gather_kernel(const EmbeddingArgs args) {
  ptx::allow_successor();
  ptx::wait_for_predecessor();
  const int64_t i = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kPiece;
  if (i >= args.n) {
    return;
  }
  const int64_t row = blockIdx.x;
  const int64_t token = args.first + args.tokens[row];
  F32x8 x;
#pragma unroll
  for (float& value : x.v) {
    value = __uint_as_float(0x7fc00000U);
  }
  if (token >= 0 && token < args.vocab) {
    x = load_table_piece(static_cast<const Element*>(args.table) + token * args.n + i);
  }
  float4* out = reinterpret_cast<float4*>(args.out + row * args.n + i);
  if (args.result == GatherResult::kAdd) {
    const F32x8 given = load_f32x8(args.out + row * args.n + i);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      x.v[j] += given.v[j];
    }
  }
  out[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  out[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

}  // namespace

cudaError_t gather_embeddings(const EmbeddingArgs& args, const LaunchContext& context) {
  const int64_t slices = (args.n / kPiece + kThreads - 1) / kThreads;
  if (!row_width_ok(args.n) || slices > 65535 || args.rows < 0 || args.rows > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const Grid grid{
      .blocks = dim3(static_cast<unsigned>(args.rows), static_cast<unsigned>(slices)),
      .threads = kThreads,
  };
  switch (args.dtype) {
    case DType::kBF16:
      return launch(gather_kernel<__nv_bfloat16>, grid, context, args);
    case DType::kF16:
      return launch(gather_kernel<__half>, grid, context, args);
    case DType::kF32:
      return launch(gather_kernel<float>, grid, context, args);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace nibble::cuda
