#pragma once

// Logits of routers by products of one warp (mma.sync): x in BF16, the router as sums of BF16
// numbers, its planes. Whatever number of rows there are, a row's products are added in the same
// order, so that it takes the same experts in every batch: warp w of a block has pieces w,
// w + kLogitWarps, ... of 32 columns and adds theirs in this order, plane by plane; then the sums
// of warps are added in theirs. Lane (g, t) loads columns 8 t..+7 of a piece: 16 bytes of expert
// g's and of row g's, so that what is the second column of a product is another one of the piece.

#include <cstdint>

#include "backend/cuda/expert_kernels.h"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nibble::cuda {

constexpr int kLogitWarps = 16;
constexpr int kLogitThreads = 32 * kLogitWarps;
constexpr int kLogitPiece = 32;  // columns

/// Where a lane's columns of a piece lie; null past the last column, where all are zeros.
__device__ __forceinline__ const uint4* columns_at(const uint16_t* row,
                                                   int64_t column,
                                                   int64_t end) {
  return column < end ? reinterpret_cast<const uint4*>(row + column) : nullptr;
}

/// sums += a piece of 16 experts, g and g + 8 of this lane, times one of 8 rows.
__device__ __forceinline__ void add_piece(float (&sums)[4],
                                          const uint4 (&experts)[2],
                                          const uint4& row) {
  const uint32_t first[4] = {experts[0].x, experts[1].x, experts[0].y, experts[1].y};
  const uint32_t second[4] = {experts[0].z, experts[1].z, experts[0].w, experts[1].w};
  ptx::warp_mma_bf16(sums, first, {row.x, row.y});
  ptx::warp_mma_bf16(sums, second, {row.z, row.w});
}

/// A block has 16 kExpertTiles experts and 8 kRowTiles rows. kAhead pieces of a warp are loaded at
/// once, those of the router before the kernel in front has ended.
template <int kExpertTiles, int kRowTiles, int kPlanes, int kAhead>
__global__ __launch_bounds__(kLogitThreads) void logits_kernel(const RouterLogitsArgs args) {
  constexpr int kRows = 8 * kRowTiles;
  constexpr int kStride = 17;  // of a row in shared memory: 16 experts
  static_assert(16 * kRows <= kLogitThreads);
  __shared__ float parts[kLogitWarps][kRows * kStride];
  ptx::allow_successor();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const int64_t first_expert = int64_t{blockIdx.y} * 16 * kExpertTiles;
  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  const uint16_t* const router = args.router;
  const auto* const x = static_cast<const uint16_t*>(args.x);
  const int64_t plane_size = args.experts * args.hidden;
  const int64_t pieces = (args.hidden + kLogitPiece - 1) / kLogitPiece;
  uint4 w[kAhead][kPlanes][kExpertTiles][2];
  const auto column_of = [&](int64_t piece, int ahead) {
    return (piece + ahead * kLogitWarps) * kLogitPiece + 8 * t;
  };
  const auto load_router = [&](int64_t piece) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
        for (int e = 0; e < 2 * kExpertTiles; ++e) {
          const int64_t expert = min(first_expert + 8 * e + g, int64_t{args.experts - 1});
          const uint4* const from = columns_at(router + plane * plane_size + expert * args.hidden,
                                               column_of(piece, a), args.hidden);
          w[a][plane][e / 2][e % 2] = from != nullptr ? __ldg(from) : uint4{0, 0, 0, 0};
        }
      }
    }
  };
  load_router(warp);
  ptx::wait_for_predecessor();
  float sums[kExpertTiles][kRowTiles][4] = {};
  for (int64_t piece = warp; piece < pieces; piece += kAhead * kLogitWarps) {
    if (piece > warp) {
      load_router(piece);
    }
    uint4 v[kAhead][kRowTiles];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        const int64_t row = min(first_row + 8 * r + g, args.rows - 1);
        const uint4* const from =
            columns_at(x + row * args.hidden, column_of(piece, a), args.hidden);
        v[a][r] = from != nullptr ? *from : uint4{0, 0, 0, 0};
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) {
#pragma unroll
        for (int e = 0; e < kExpertTiles; ++e) {
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            add_piece(sums[e][r], w[a][plane][e], v[a][r]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kExpertTiles; ++e) {
    if (e > 0) {
      __syncthreads();  // all have added the sums before
    }
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        parts[warp][(8 * r + 2 * t + i % 2) * kStride + g + 8 * (i / 2)] = sums[e][r][i];
      }
    }
    __syncthreads();
    const auto number = static_cast<int>(threadIdx.x);
    const int64_t row = first_row + number / 16;
    const int64_t expert = first_expert + 16 * e + number % 16;
    if (number < 16 * kRows && row < args.rows && expert < args.experts) {
      float sum = 0.0F;
#pragma unroll
      for (const auto& part : parts) {
        sum = __fadd_rn(sum, part[number / 16 * kStride + number % 16]);
      }
      args.logits[row * args.experts + expert] =
          args.bias != nullptr ? __fadd_rn(sum, args.bias[expert]) : sum;
    }
  }
}

}  // namespace nibble::cuda
