#pragma once

// y^T [n, m] (+)= w [n, k] x^T [k, m]: matrix products by mma.sync, for sm_80 and up. Weights are
// the 16-row operand, tokens the 8-column one, so that few tokens waste little.
//
// A block of four warps makes a tile of 128 output channels and kTokens tokens; a warp has 32
// channels and all tokens. It walks k in steps of 64 through a ring of kStages stages filled by
// cp.async. Where tiles are few, k is split over blocks: each leaves its sums in the workspace and
// the last to arrive adds them in the order of the splits, so that results repeat.
//
// The order of k within a step is free as long as weights and activations agree. A step of
// activations is one or two planes of 64 bytes per token; lane (g, t) of a warp takes bytes 16 t to
// 16 t + 15 of token g of each eight with one load: the operands of two products, s = 0 and 1, each
// of two words, r = 0 and 1, at bytes 16 t + 8 s + 4 r. Weights are packed in the same order,
//   [n / 128][k / 64][warp][chunk][lane] of 16 bytes,
// so that a lane's chunks need no shuffling. What a chunk has is its codec's matter.

#include <cstdint>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/kernels/gemm_sm80/codecs.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/memory.cuh"

namespace nibble::cuda::sm80 {

inline constexpr int kThreads = 128;
inline constexpr int kStages = 4;

/// What a product's kernel needs.
struct Product {
  GemmLaunch args;
  const uint8_t* codes = nullptr;    // packed
  const uint8_t* scales = nullptr;   // [n padded] f32, or [n / 128][groups][128], or none
  const uint8_t* offsets = nullptr;  // zero points or minimums, like scales of groups, or none
  int64_t n = 0;
  int32_t steps = 0;            // of 64 in k
  int32_t splits = 1;           // gridDim.z
  uint32_t* arrived = nullptr;  // per tile
  int32_t* partial = nullptr;   // [tile][split][register][thread]
};

/// Offsets within a stage.
template <typename Codec, int kTokens>
struct Stage {
  static constexpr int kCodeBytes = 4 * Codec::kChunks * 512;
  static constexpr int kXBytes = kTokens * 64 * Codec::kPlanes;
  static constexpr int kScaleBytes =
      Codec::kGroupsPerStep * kTileRows * static_cast<int>(sizeof(typename Codec::GroupScale));
  static constexpr int kX = kCodeBytes;
  static constexpr int kScales = kX + kXBytes;
  static constexpr int kOffsets = kScales + kScaleBytes;
  static constexpr int kXScales = kOffsets + (Codec::kOffsets != Offsets::kNone ? kScaleBytes : 0);
  static constexpr int kBytes = kXScales + (Codec::kTokenGroups ? kTokens * 4 : 0);
};

/// Groups of a row whose k has `steps` steps.
template <typename Codec>
__host__ __device__ constexpr int64_t groups_of(int64_t steps) {
  return (steps * kStep + Codec::kGroup - 1) / Codec::kGroup;
}

__device__ __forceinline__ float number_of(float x) { return x; }
__device__ __forceinline__ float number_of(__nv_bfloat16 x) { return __bfloat162float(x); }

/// Starts the copies of one step's codes and scales to shared memory.
template <typename Codec, int kTokens>
__device__ __forceinline__ void copy_weights(const Product& p, int step, uint32_t stage) {
  using S = Stage<Codec, kTokens>;
  const int64_t block = int64_t{blockIdx.x} * p.steps + step;
  const uint8_t* codes = p.codes + block * S::kCodeBytes;
#pragma unroll
  for (int i = 0; i < S::kCodeBytes / (16 * kThreads); ++i) {
    const unsigned offset = (i * kThreads + threadIdx.x) * 16;
    ptx::copy_async16(stage + offset, codes + offset);
  }
  if constexpr (Codec::kGroupsPerStep > 0) {
    constexpr int kGroupBytes = S::kScaleBytes / Codec::kGroupsPerStep;
    const int64_t group =
        blockIdx.x * groups_of<Codec>(p.steps) + int64_t{step} * kStep / Codec::kGroup;
    const uint8_t* scales = p.scales + group * kGroupBytes;
    if (threadIdx.x < S::kScaleBytes / 16) {
      ptx::copy_async16(stage + S::kScales + threadIdx.x * 16, scales + threadIdx.x * 16);
      if constexpr (Codec::kOffsets != Offsets::kNone) {
        ptx::copy_async16(stage + S::kOffsets + threadIdx.x * 16,
                          p.offsets + (scales - p.scales) + threadIdx.x * 16);
      }
    }
  }
}

/// The same for its activations and the scales that they have; tokens past the end are zeros.
template <typename Codec, int kTokens>
__device__ __forceinline__ void copy_activations(const Product& p, int step, uint32_t stage) {
  using S = Stage<Codec, kTokens>;
  constexpr int kPieces = S::kXBytes / 16;
  const auto* x = static_cast<const uint8_t*>(p.args.x);
  const int64_t row_bytes = int64_t{p.steps} * 64 * Codec::kPlanes;
#pragma unroll
  for (int base = 0; base < kPieces; base += kThreads) {
    const int i = base + static_cast<int>(threadIdx.x);
    if (i < kPieces) {
      const int plane = i / (kTokens * 4);
      const int64_t token = int64_t{blockIdx.y} * kTokens + i / 4 % kTokens;
      const bool valid = token < p.args.m;
      const uint8_t* source = x + (valid ? token : int64_t{blockIdx.y} * kTokens) * row_bytes +
                              (int64_t{step} * Codec::kPlanes + plane) * 64 + i % 4 * 16;
      ptx::copy_async16(stage + S::kX + static_cast<unsigned>(i) * 16, source, valid ? 16 : 0);
    }
  }
  if constexpr (Codec::kTokenGroups) {
    if (threadIdx.x < kTokens) {
      const int64_t first = int64_t{blockIdx.y} * kTokens;
      const bool valid = first + threadIdx.x < p.args.m;
      const float* source = p.args.x_scales +
                            (valid ? first + threadIdx.x : first) * groups_of<Codec>(p.steps) +
                            int64_t{step} * kStep / Codec::kGroup;
      ptx::copy_async4(stage + S::kXScales + threadIdx.x * 4, source, valid ? 4 : 0);
    }
  }
}

template <typename Sum, int kTokens>
struct Sums {
  Sum v[2][kTokens / 8][4];  // [16 rows][8 tokens][register]
};

/// Sums of two products' activations by token: of registers 0 and 1, and of 2 and 3 alike.
template <typename Codec>
__device__ __forceinline__ void sum_activations(const uint4& x, float (&sums)[2]) {
  constexpr uint32_t kOnes = 0x3f803f80U;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  float products[4] = {};
  Codec::multiply(products, ones, {x.x, x.y});
  Codec::multiply(products, ones, {x.z, x.w});
  sums[0] = products[0];
  sums[1] = products[1];
}

/// Adds the products of one step in shared memory.
template <typename Codec, int kTokens>
__device__ __forceinline__ void multiply(const uint8_t* stage,
                                         Sums<typename Codec::Sum, kTokens>& sums) {
  using S = Stage<Codec, kTokens>;
  const unsigned warp = threadIdx.x / 32;
  const unsigned lane = threadIdx.x % 32;
  typename Codec::Fragments weights;
  const auto* codes = reinterpret_cast<const uint4*>(stage) + warp * Codec::kChunks * 32 + lane;
#pragma unroll
  for (int c = 0; c < Codec::kChunks; ++c) {
    weights.chunks[c] = codes[c * 32];
  }
#pragma unroll
  for (int plane = 0; plane < Codec::kPlanes; ++plane) {
    uint4 x[kTokens / 8];
    const auto* tokens = reinterpret_cast<const uint4*>(stage + S::kX) + plane * kTokens * 4 + lane;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
      x[j] = tokens[j * 32];  // token 8 j + lane / 4, bytes from 16 (lane % 4) on
    }
    float2 x_scales[kTokens / 8];  // of tokens 8 j + 2 (lane % 4) and the next
    if constexpr (Codec::kTokenGroups) {
      const auto* given = reinterpret_cast<const float2*>(stage + S::kXScales) + lane % 4;
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        x_scales[j] = given[j * 4];
      }
    }
    float x_sums[kTokens / 8][2];
    if constexpr (Codec::kOffsets == Offsets::kMinimums) {
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        sum_activations<Codec>(x[j], x_sums[j]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[2][4];
      if constexpr (Codec::kOffsets != Offsets::kZeros) {
        weights.decode(plane, half, 0, a[0]);
        weights.decode(plane, half, 1, a[1]);
      }
      float scale[2] = {1.0F, 1.0F};  // of rows g and g + 8
      float minimum[2] = {};
      if constexpr (Codec::kGroupsPerStep > 0) {
        const unsigned group = Codec::kGroupsPerStep == 2 ? plane : 0;
        const auto* scales =
            reinterpret_cast<const typename Codec::GroupScale*>(stage + S::kScales) +
            group * kTileRows + warp * 32 + half * 16 + lane / 4;
        scale[0] = number_of(scales[0]);
        scale[1] = number_of(scales[8]);
        const auto* stored = scales + Codec::kGroupsPerStep * kTileRows;
        if constexpr (Codec::kOffsets == Offsets::kZeros) {
          const float zeros[2] = {number_of(stored[0]), number_of(stored[8])};
          weights.decode(plane, half, 0, zeros, a[0]);
          weights.decode(plane, half, 1, zeros, a[1]);
        } else if constexpr (Codec::kOffsets == Offsets::kMinimums) {
          minimum[0] = number_of(stored[0]);
          minimum[1] = number_of(stored[8]);
        }
      }
#pragma unroll
      for (int j = 0; j < kTokens / 8; ++j) {
        const uint32_t first[2] = {x[j].x, x[j].y};
        const uint32_t second[2] = {x[j].z, x[j].w};
        auto& sum = sums.v[half][j];
        if constexpr (Codec::kGroupsPerStep > 0 || Codec::kSumsApart) {
          float part[4] = {};
          Codec::multiply(part, a[0], first);
          Codec::multiply(part, a[1], second);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float factor = scale[i / 2];
            if constexpr (Codec::kTokenGroups) {
              factor *= i % 2 == 0 ? x_scales[j].x : x_scales[j].y;
            }
            sum[i] = fmaf(part[i], factor, sum[i]);
            if constexpr (Codec::kOffsets == Offsets::kMinimums) {
              sum[i] = fmaf(x_sums[j][i % 2], minimum[i / 2], sum[i]);
            }
          }
        } else {
          Codec::multiply(sum, a[0], first);
          Codec::multiply(sum, a[1], second);
        }
      }
    }
  }
}

/// Hands this block's sums to the last block of the tile. True in that one, which then has the sums
/// of all, added in the order of the splits; it leaves the workspace zero.
template <typename Sum, int kTokens>
__device__ __forceinline__ bool reduce_splits(const Product& p, Sums<Sum, kTokens>& sums) {
  constexpr int kRegisters = kTokens;  // 2 * (kTokens / 8) * 4
  const int64_t tile = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const int64_t split_size = int64_t{kRegisters} * kThreads;
  auto* partial = reinterpret_cast<Sum*>(p.partial) + tile * p.splits * split_size + threadIdx.x;
  Sum* own = partial + blockIdx.z * split_size;
#pragma unroll
  for (int r = 0; r < kRegisters; ++r) {
    own[r * kThreads] = sums.v[r / 4 / (kTokens / 8)][r / 4 % (kTokens / 8)][r % 4];
  }
  __shared__ uint32_t before;
  __syncthreads();
  if (threadIdx.x == 0) {
    before = ptx::add_acquire_release(p.arrived + tile, 1);
  }
  __syncthreads();
  if (before + 1 != static_cast<uint32_t>(p.splits)) {
    return false;
  }
  sums = {};
  for (int s = 0; s < p.splits; ++s) {
#pragma unroll
    for (int r = 0; r < kRegisters; ++r) {
      Sum* at = partial + s * split_size + r * kThreads;
      sums.v[r / 4 / (kTokens / 8)][r / 4 % (kTokens / 8)][r % 4] += __ldcg(at);
      *at = 0;
    }
  }
  if (threadIdx.x == 0) {
    p.arrived[tile] = 0;
  }
  return true;
}

/// Scales the sums and writes them to y.
template <typename Codec, int kTokens>
__device__ __forceinline__ void store(const Product& p,
                                      const Sums<typename Codec::Sum, kTokens>& sums) {
  const GemmLaunch& args = p.args;
  const unsigned lane = threadIdx.x % 32;
  const int64_t first_row = int64_t{blockIdx.x} * kTileRows + threadIdx.x / 32 * 32 + lane / 4;
  const int64_t first_token = int64_t{blockIdx.y} * kTokens + lane % 4 * 2;
#pragma unroll
  for (int part = 0; part < 4; ++part) {  // rows g, g + 8, g + 16, g + 24 of the warp
    const int64_t row = first_row + part * 8;
    if (row >= p.n) {
      continue;
    }
    const float row_scale =
        Codec::kRowScales ? reinterpret_cast<const float*>(p.scales)[row] * Codec::kCodeUnit : 1.0F;
    const float bias = args.bias != nullptr ? args.bias[row] : 0.0F;
#pragma unroll
    for (int j = 0; j < kTokens / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t token = first_token + j * 8 + i;
        if (token >= args.m) {
          continue;
        }
        float y = static_cast<float>(sums.v[part / 2][j][part % 2 * 2 + i]);
        if constexpr (Codec::kTokenScales) {
          y = __fmul_rn(y, __fmul_rn(row_scale, args.x_scales[token]));  // as the CPU does
        } else if constexpr (Codec::kRowScales) {
          y = __fmul_rn(y, row_scale);
        }
        y = __fadd_rn(y, bias);
        const int64_t at = token * args.y_stride + row;
        if (args.result == GemmResult::kBf16) {
          static_cast<__nv_bfloat16*>(args.y)[at] = __float2bfloat16_rn(y);
        } else {
          auto* out = static_cast<float*>(args.y) + at;
          *out = args.result == GemmResult::kAddF32 ? __fadd_rn(*out, y) : y;
        }
      }
    }
  }
}

/// A block's tile of the product.
template <typename Codec, int kTokens>
__device__ __forceinline__ void multiply_tile(const Product& p) {
  using S = Stage<Codec, kTokens>;
  extern __shared__ __align__(16) uint8_t ring[];
  const uint32_t shared = ptx::shared_address(ring);
  const auto begin = static_cast<int>(int64_t{p.steps} * blockIdx.z / gridDim.z);
  const auto end = static_cast<int>(int64_t{p.steps} * (blockIdx.z + 1) / gridDim.z);
  const auto offset_of = [&](int step) {
    return static_cast<uint32_t>((step - begin) % kStages) * S::kBytes;
  };
  for (int step = begin; step < min(begin + kStages - 1, end); ++step) {
    copy_weights<Codec, kTokens>(p, step, shared + offset_of(step));
  }
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  for (int step = begin; step < begin + kStages - 1; ++step) {
    if (step < end) {
      copy_activations<Codec, kTokens>(p, step, shared + offset_of(step));
    }
    ptx::copy_commit();  // one group per step, an empty one past the end
  }
  Sums<typename Codec::Sum, kTokens> sums = {};
  for (int step = begin; step < end; ++step) {
    ptx::copy_wait<kStages - 2>();
    __syncthreads();  // the step has arrived for all, and all have left the stage before it
    const int next = step + kStages - 1;
    if (next < end) {
      copy_weights<Codec, kTokens>(p, next, shared + offset_of(next));
      copy_activations<Codec, kTokens>(p, next, shared + offset_of(next));
    }
    ptx::copy_commit();
    multiply<Codec, kTokens>(ring + offset_of(step), sums);
  }
  if (p.splits == 1 || reduce_splits<typename Codec::Sum, kTokens>(p, sums)) {
    store<Codec, kTokens>(p, sums);
  }
}

template <typename Codec, int kTokens>
__global__ __launch_bounds__(kThreads) void gemm_kernel(const Product p) {
  multiply_tile<Codec, kTokens>(p);
}

/// Where the experts of a layer lie, beside a Product whose args are those of all slots.
struct GroupedProduct {
  Product product;
  const uint8_t* packed = nullptr;    // of the first expert
  int64_t expert_bytes = 0;           // to the next one's
  const ExpertTile* tiles = nullptr;  // gridDim.y
  int64_t code_bytes = 0;             // of an expert: its scales lie behind them
  int64_t offset_bytes = 0;           // from scales to offsets
  int64_t x_row_bytes = 0;
  int64_t y_row_bytes = 0;
  int64_t x_row_scales = 1;
};

/// Tile blockIdx.y of the list: rows of one expert. They are made to look like tile blockIdx.y of a
/// product that has rows up to theirs.
template <typename Codec, int kTokens>
__global__ __launch_bounds__(kThreads) void grouped_kernel(const GroupedProduct g) {
  ptx::wait_for_predecessor();
  const ExpertTile tile = g.tiles[blockIdx.y];
  if (tile.rows == 0) {
    return;
  }
  Product p = g.product;
  const uint8_t* packed = g.packed + tile.expert * g.expert_bytes;
  p.codes = packed;
  p.scales = packed + g.code_bytes;
  p.offsets = p.scales + g.offset_bytes;
  const int64_t ahead = int64_t{blockIdx.y} * kTokens;
  const int64_t moved = tile.first - ahead;
  p.args.x = static_cast<const uint8_t*>(p.args.x) + moved * g.x_row_bytes;
  p.args.x_scales += moved * g.x_row_scales;
  p.args.y = static_cast<uint8_t*>(p.args.y) + moved * g.y_row_bytes;
  p.args.bias = p.args.bias == nullptr ? nullptr : p.args.bias + tile.expert * p.n;
  p.args.m = ahead + tile.rows;
  multiply_tile<Codec, kTokens>(p);
}

}  // namespace nibble::cuda::sm80
