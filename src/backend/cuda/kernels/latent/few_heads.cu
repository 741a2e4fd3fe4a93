// Products of all heads' matrices with a few rows: each row of a matrix is a dot product of a group
// of lanes, which have several such rows under way at once.

#include <algorithm>

#include "backend/cuda/few_heads.h"
#include "backend/cuda/kernels/rows/common.cuh"
#include "backend/cuda/ptx/dependency.cuh"

namespace nibble::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kLoads = 8;  // pieces of matrices that a lane waits for at once

/// A group of kLanes lanes has kPieces pieces of 8 numbers each of a matrix's row.
template <int kLanes_, int kPieces_>
struct FewHeadsForm {
  static constexpr int kLanes = kLanes_, kPieces = kPieces_;
  static constexpr int kGroupRows = kLoads / kPieces;
  static constexpr int kBlockRows = kWarps * (32 / kLanes) * kGroupRows;
  static constexpr int kMostColumns = kLanes * kPieces * kPiece;
};

__device__ __forceinline__ float add_products(const uint4& a, const uint4& b, float sum) {
  const uint32_t left[4] = {a.x, a.y, a.z, a.w};
  const uint32_t right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum = __fmaf_rn(__uint_as_float(left[i] << 16), __uint_as_float(right[i] << 16), sum);
    sum = __fmaf_rn(__uint_as_float(left[i] & 0xffff0000U), __uint_as_float(right[i] & 0xffff0000U),
                    sum);
  }
  return sum;
}

/// Piece p of a lane of `numbers`, zeros behind its end.
template <typename Form>
__device__ __forceinline__ uint4 load_piece(const __nv_bfloat16* numbers, int lane, int p, int k) {
  const int at = (p * Form::kLanes + lane) * kPiece;
  return at < k ? *reinterpret_cast<const uint4*>(numbers + at) : uint4{0, 0, 0, 0};
}

template <typename Form, int kM>
__global__ __launch_bounds__(kThreads, 2) void few_heads_kernel(const FewHeadsLaunch args) {
  ptx::allow_successor();
  const int lane = static_cast<int>(threadIdx.x) % Form::kLanes;
  const int group = static_cast<int>(threadIdx.x) / Form::kLanes;
  const int first = static_cast<int>(blockIdx.x) * Form::kBlockRows + group * Form::kGroupRows;
  const int64_t head = blockIdx.y;
  const auto* matrix = static_cast<const __nv_bfloat16*>(args.w) + head * args.n * args.k;
  uint4 w[Form::kGroupRows][Form::kPieces];
#pragma unroll
  for (int r = 0; r < Form::kGroupRows; ++r) {
    const int row = min(first + r, args.n - 1);
#pragma unroll
    for (int p = 0; p < Form::kPieces; ++p) {
      w[r][p] = load_piece<Form>(matrix + int64_t{row} * args.k, lane, p, args.k);
    }
  }
  ptx::wait_for_predecessor();
  uint4 x[kM][Form::kPieces];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const int row = min(m, args.m - 1);
    const auto* numbers =
        static_cast<const __nv_bfloat16*>(args.x) + row * args.x_stride + head * args.x_head;
#pragma unroll
    for (int p = 0; p < Form::kPieces; ++p) {
      x[m][p] = load_piece<Form>(numbers, lane, p, args.k);
    }
  }
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    float mine = 0.0F;  // that of row `first + lane`
#pragma unroll
    for (int r = 0; r < Form::kGroupRows; ++r) {
      float sum = 0.0F;
#pragma unroll
      for (int p = 0; p < Form::kPieces; ++p) {
        sum = add_products(w[r][p], x[m][p], sum);
      }
#pragma unroll
      for (int distance = Form::kLanes / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      mine = lane == r ? sum : mine;
    }
    if (m < args.m && lane < Form::kGroupRows && first + lane < args.n) {
      static_cast<__nv_bfloat16*>(args.y)[m * args.y_stride + head * args.y_head + first + lane] =
          __float2bfloat16_rn(mine);
    }
  }
}

template <typename Form>
cudaError_t launch_form(const FewHeadsLaunch& args, const LaunchContext& context) {
  const int blocks = (args.n + Form::kBlockRows - 1) / Form::kBlockRows;
  const Grid grid{.blocks = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(args.heads)),
                  .threads = kThreads};
  static_assert(kMostFewRows == 4);
  return args.m == 1   ? launch(few_heads_kernel<Form, 1>, grid, context, args)
         : args.m == 2 ? launch(few_heads_kernel<Form, 2>, grid, context, args)
                       : launch(few_heads_kernel<Form, 4>, grid, context, args);
}

using Narrow = FewHeadsForm<16, 1>;
using Wide = FewHeadsForm<32, 2>;
static_assert(Wide::kMostColumns == kMostFewColumns);
static_assert(Narrow::kGroupRows <= Narrow::kLanes && Wide::kGroupRows <= Wide::kLanes);

}  // namespace

bool are_few_heads(const FewHeadsLaunch& args) {
  const bool sizes = args.m > 0 && args.m <= kMostFewRows && args.heads > 0 &&
                     args.heads <= 65535 && args.n > 0 && args.k > 0 && args.k <= kMostFewColumns;
  return sizes && args.k % kPiece == 0 && args.x_stride % kPiece == 0 &&
         args.x_head % kPiece == 0 && reinterpret_cast<uintptr_t>(args.x) % 16 == 0;
}

cudaError_t multiply_few_heads(const FewHeadsLaunch& args, const LaunchContext& context) {
  if (!are_few_heads(args)) {
    return cudaErrorInvalidValue;
  }
  return args.k <= Narrow::kMostColumns ? launch_form<Narrow>(args, context)
                                        : launch_form<Wide>(args, context);
}

}  // namespace nibble::cuda
