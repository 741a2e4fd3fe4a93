#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/gemm_kernel.h"
#include "backend/cuda/int_blocks.h"
#include "backend/cuda/kernels/w4ax/piece.cuh"
#include "backend/cuda/ptx/barrier.cuh"
#include "backend/cuda/ptx/copy.cuh"
#include "backend/cuda/ptx/dependency.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/mma_s4.cuh"
#include "backend/cuda/ptx/mma_s8.cuh"

// y = x · wᵀ in blocks of 4 and 8 bits for sm_80 to sm_89: blocks of 4 bits by products of INT4,
// the others by products of INT8. Rows of x are INT8 either way, of which one instruction loads the
// fragments of two products; two operations make eight INT4 of them, in the order in which pieces
// hold weights. A block of four warps makes a tile of 128 channels and kTokens tokens; copies of
// one K block are under way while another is multiplied.
namespace nibble::cuda::sm80 {

#if __CUDA_ARCH__ >= 900
inline constexpr bool kHasInt4 = false;
#else
inline constexpr bool kHasInt4 = true;
#endif

inline constexpr int kW4AxThreads = 128;
inline constexpr int kW4AxPieces = 4;  // a warp each

struct W4AxProduct {
  GemmLaunch args;
  IntBlocks blocks;
  const uint8_t* pieces = nullptr;
  int64_t n = 0, k = 0;
  int row_pieces = 0, k_blocks = 0;
  int64_t x_scale_stride = 0;
};

template <typename Form, int kTokens>
struct W4AxStage {
  static constexpr int kPieces = kW4AxPieces * Form::kPieceBytes;
  static constexpr int kX = (kPieces + 127) / 128 * 128;
  static constexpr int kScales = kX + kTokens * 128;
  static constexpr int kScaleBytes = kTokens * 4;  // of a block
  static constexpr int kBytes = (kScales + Form::kSubs * kScaleBytes + 127) / 128 * 128;
};

template <typename Form, int kTokens>
__device__ __forceinline__ void w4ax_copy(const W4AxProduct& p, int block, uint32_t stage) {
  using Stage = W4AxStage<Form, kTokens>;
  constexpr int kChunks = Form::kPieceBytes / 16;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < kW4AxPieces * kChunks; i += kW4AxThreads) {
    const int row = min(static_cast<int>(blockIdx.x) * kW4AxPieces + i / kChunks, p.row_pieces - 1);
    const int64_t piece = static_cast<int64_t>(row) * p.k_blocks + block;
    ptx::copy_async16(stage + i * 16, p.pieces + piece * Form::kPieceBytes + i % kChunks * 16);
  }
  const auto* x = static_cast<const uint8_t*>(p.args.x);
  const int64_t first = int64_t{blockIdx.y} * kTokens;
  for (int i = thread; i < kTokens * 8; i += kW4AxThreads) {
    const int row = i / 8, chunk = i % 8;
    const int64_t token = first + row, column = int64_t{block} * 128 + chunk * 16;
    const bool inside = token < p.args.m && column < p.k;
    ptx::copy_async16(stage + Stage::kX + row * 128 + ((chunk ^ (row & 7)) << 4),
                      x + (inside ? token * p.k + column : 0), inside ? 16 : 0);
  }
  for (int i = thread; i < Form::kSubs * kTokens / 4; i += kW4AxThreads) {
    const int sub = i / (kTokens / 4), four = i % (kTokens / 4) * 4;
    ptx::copy_async16(
        stage + Stage::kScales + sub * Stage::kScaleBytes + four * 4,
        p.args.x_scales + (int64_t{block} * Form::kSubs + sub) * p.x_scale_stride + first + four);
  }
}

/// Sums of a warp's 32 channels, [16 of them][8 tokens][register], which have their scales.
template <int kTokens>
struct W4AxTotals {
  float v[2][kTokens / 8][4];
};

/// Eight INT4 of two words of INT8, the second one's in the high nibbles.
__device__ __forceinline__ uint32_t w4ax_narrow(uint32_t low, uint32_t high) {
  return (low & 0x0f0f0f0fU) | (high << 4 & 0xf0f0f0f0U);
}

/// One block of K: kSteps steps of 32, from step kFirst on of its 128.
template <typename Form, int kTokens, int kFirst>
struct W4AxBlock {
  static constexpr int kSteps = 4 / Form::kSubs;
  static constexpr int kSub = kFirst / kSteps;
  using Stage = W4AxStage<Form, kTokens>;

  // Activations of eight tokens: two words for each step.
  static __device__ __forceinline__ void load_x(uint32_t stage,
                                                int octet,
                                                int lane,
                                                uint32_t (&b)[kSteps][2]) {
    const int row = lane & 7;
#pragma unroll
    for (int pair = kFirst / 2; pair < (kFirst + kSteps + 1) / 2; ++pair) {
      uint32_t v[4];
      const int chunk = 4 * pair + (lane >> 3);
      ptx::load_matrix4(v, stage + Stage::kX + (octet * 8 + row) * 128 + ((chunk ^ row) << 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int step = 2 * pair + i / 2 - kFirst;
        if (step >= 0 && step < kSteps) {
          b[step][i % 2] = v[i];
        }
      }
    }
  }

  // Sums of products of INT8, 16 times the codes'.
  static __device__ __forceinline__ void multiply_eight(const uint32_t (&words)[8],
                                                        const uint32_t (&b)[kSteps][2],
                                                        int32_t (&d)[4]) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint32_t first = words[2 * (kFirst + s)], second = words[2 * (kFirst + s) + 1];
      const uint32_t a[4] = {(first << 4) & 0xf0f0f0f0U, first & 0xf0f0f0f0U,
                             (second << 4) & 0xf0f0f0f0U, second & 0xf0f0f0f0U};
      ptx::warp_mma_s8(d, a, b[s]);
    }
  }

  // The same of INT4.
  static __device__ __forceinline__ void multiply_four(const uint32_t (&words)[8],
                                                       const uint32_t (&b)[kSteps][2],
                                                       int32_t (&d)[4]) {
    const auto weights = [&words](int step, uint32_t* a) {
      const uint32_t first = words[2 * (kFirst + step)], second = words[2 * (kFirst + step) + 1];
      a[0] = w4ax_narrow(first, second);
      a[1] = w4ax_narrow(first >> 4, second >> 4);
    };
    if constexpr (kSteps == 1) {
      uint32_t a[2];
      weights(0, a);
      ptx::warp_mma_s4_half(d, a, w4ax_narrow(b[0][0], b[0][1]));
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; s += 2) {
        uint32_t a[4];
        weights(s, a);
        weights(s + 1, a + 2);
        const uint32_t narrow[2] = {w4ax_narrow(b[s][0], b[s][1]),
                                    w4ax_narrow(b[s + 1][0], b[s + 1][1])};
        ptx::warp_mma_s4(d, a, narrow);
      }
    }
#pragma unroll
    for (int32_t& sum : d) {
      sum *= 16;
    }
  }

  // bits: of this block.
  static __device__ __forceinline__ void add(uint32_t stage,
                                             const uint32_t (&words)[2][8],
                                             int bits,
                                             W4AxTotals<kTokens>& totals) {
    const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5);
    float2 w[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      w[h] = w4ax_scales(ptx::load_shared4(stage + warp * Form::kPieceBytes + Form::kCodeBytes +
                                           kSub * 64 + h * 32 + (lane >> 2) * 4));
    }
#pragma unroll
    for (int octet = 0; octet < kTokens / 8; ++octet) {
      uint32_t b[kSteps][2];
      load_x(stage, octet, lane, b);
      const uint2 x = ptx::load_shared8(stage + Stage::kScales + kSub * Stage::kScaleBytes +
                                        octet * 32 + (lane & 3) * 8);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int32_t d[4] = {};
        if (kHasInt4 && bits == 4) {
          multiply_four(words[h], b, d);
        } else {
          multiply_eight(words[h], b, d);
        }
        auto& to = totals.v[h][octet];
        const float x0 = __uint_as_float(x.x), x1 = __uint_as_float(x.y);
        to[0] = w4ax_add(d[0], w[h].x, x0, to[0]);
        to[1] = w4ax_add(d[1], w[h].x, x1, to[1]);
        to[2] = w4ax_add(d[2], w[h].y, x0, to[2]);
        to[3] = w4ax_add(d[3], w[h].y, x1, to[3]);
      }
    }
  }
};

template <typename Form, int kTokens>
__device__ __forceinline__ void w4ax_multiply(const W4AxProduct& p,
                                              int block,
                                              uint32_t stage,
                                              W4AxTotals<kTokens>& totals) {
  const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5);
  uint32_t words[2][8];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const W4AxWords fetched = W4AxWords::fetch(stage + warp * Form::kPieceBytes, h, lane);
    const uint4 q[2] = {fetched.halves[0], fetched.halves[1]};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      words[h][4 * i] = q[i].x;
      words[h][4 * i + 1] = q[i].y;
      words[h][4 * i + 2] = q[i].z;
      words[h][4 * i + 3] = q[i].w;
    }
  }
  const auto bits_of = [&](int sub) {  // of what fills K up, 8
    const int64_t column = int64_t{block} * 128 + sub * (128 / Form::kSubs);
    return column < p.k ? static_cast<int>(__ldg(p.blocks.bits + column / p.blocks.block)) : 8;
  };
  constexpr int kSteps = 4 / Form::kSubs;
  W4AxBlock<Form, kTokens, 0>::add(stage, words, bits_of(0), totals);
  if constexpr (Form::kSubs > 1) {
    W4AxBlock<Form, kTokens, kSteps>::add(stage, words, bits_of(1), totals);
  }
  if constexpr (Form::kSubs > 2) {
    W4AxBlock<Form, kTokens, 2 * kSteps>::add(stage, words, bits_of(2), totals);
    W4AxBlock<Form, kTokens, 3 * kSteps>::add(stage, words, bits_of(3), totals);
  }
}

template <int kTokens>
__device__ __forceinline__ void w4ax_store(const W4AxProduct& p,
                                           const W4AxTotals<kTokens>& totals) {
  const GemmLaunch& args = p.args;
  const int lane = static_cast<int>(threadIdx.x & 31), warp = static_cast<int>(threadIdx.x >> 5);
  const int64_t row0 = int64_t{blockIdx.x} * 128 + warp * 32 + 2 * (lane >> 2);
  const int64_t token0 = int64_t{blockIdx.y} * kTokens + 2 * (lane & 3);
#pragma unroll
  for (int at = 0; at < 8 * (kTokens / 8); ++at) {
    const int h = at % 2, i = at / 2 % 4, octet = at / 8;
    const int64_t row = row0 + 16 * h + i / 2, token = token0 + 8 * octet + i % 2;
    if (row >= p.n || token >= args.m) {
      continue;
    }
    float y = totals.v[h][octet][i];
    y = args.bias == nullptr ? y : __fadd_rn(y, args.bias[row]);
    const int64_t index = token * args.y_stride + row;
    if (args.result == GemmResult::kBf16) {
      static_cast<__nv_bfloat16*>(args.y)[index] = __float2bfloat16_rn(y);
    } else {
      auto* to = static_cast<float*>(args.y) + index;
      *to = args.result == GemmResult::kAddF32 ? __fadd_rn(y, *to) : y;
    }
  }
}

template <typename Form, int kTokens>
__global__ __launch_bounds__(kW4AxThreads) void w4ax_kernel(const W4AxProduct p) {
  constexpr int kBytes = W4AxStage<Form, kTokens>::kBytes;
  extern __shared__ __align__(128) uint8_t stages[];
  const uint32_t shared = ptx::shared_address(stages);
  ptx::wait_for_predecessor();
  ptx::allow_successor();
  w4ax_copy<Form, kTokens>(p, 0, shared);
  ptx::copy_commit();
  W4AxTotals<kTokens> totals = {};
  for (int block = 0; block < p.k_blocks; ++block) {
    if (block + 1 < p.k_blocks) {
      w4ax_copy<Form, kTokens>(p, block + 1, shared + (block + 1) % 2 * kBytes);
    }
    ptx::copy_commit();
    ptx::copy_wait<1>();
    __syncthreads();  // the block has arrived for all
    w4ax_multiply<Form, kTokens>(p, block, shared + block % 2 * kBytes, totals);
    __syncthreads();  // all have left it
  }
  w4ax_store<kTokens>(p, totals);
}

}  // namespace nibble::cuda::sm80
