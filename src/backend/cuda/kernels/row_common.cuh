#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "backend/cuda/row_kernels.h"

namespace nibble::cuda {

/// Blocks that own one row. A thread takes pieces of eight elements, blockDim.x pieces apart; with
/// kPieces > 0 it keeps them in registers, with kPieces == 0 (wide rows) it loads them once more.

inline constexpr int kPiece = 8;
inline constexpr int kMaxRowThreads = 1024;
inline constexpr unsigned kAllLanes = 0xffffffffU;

struct alignas(16) F32x8 {
  float v[kPiece];
};

__device__ __forceinline__ F32x8 load_f32x8(const float* p) {
  const float4 low = *reinterpret_cast<const float4*>(p);
  const float4 high = *reinterpret_cast<const float4*>(p + 4);
  return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
}

__device__ __forceinline__ F32x8 load_bf16x8(const __nv_bfloat16* p) {
  const uint4 words = *reinterpret_cast<const uint4*>(p);
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
  F32x8 out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.v[2 * i] = __uint_as_float(w[i] << 16);
    out.v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000U);
  }
  return out;
}

__device__ __forceinline__ uint32_t bf16x2_bits(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void store_bf16x8(__nv_bfloat16* p, const F32x8& x) {
  *reinterpret_cast<uint4*>(p) =
      make_uint4(bf16x2_bits(x.v[0], x.v[1]), bf16x2_bits(x.v[2], x.v[3]),
                 bf16x2_bits(x.v[4], x.v[5]), bf16x2_bits(x.v[6], x.v[7]));
}

/// Four codes of x * factor in a word. Values that are not finite give any code.
__device__ __forceinline__ uint32_t int8x4_bits(const float* x, float factor) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word |= (static_cast<uint32_t>(__float2int_rn(x[i] * factor)) & 0xffU) << (8 * i);
  }
  return word;
}

__device__ __forceinline__ uint32_t e4m3x4_bits(const float* x, float factor) {
  const float2 low = make_float2(x[0] * factor, x[1] * factor);
  const float2 high = make_float2(x[2] * factor, x[3] * factor);
  const uint32_t lower = __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3);
  const uint32_t upper = __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3);
  return lower | (upper << 16);
}

/// body(p, i) for each piece of the thread: its number and its first element.
template <int kPieces, typename Body>
__device__ __forceinline__ void for_each_piece(int64_t n, const Body& body) {
  if constexpr (kPieces > 0) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int64_t i = (int64_t{p} * blockDim.x + threadIdx.x) * kPiece;
      if (i < n) {
        body(p, i);
      }
    }
  } else {
    for (int64_t i = int64_t{threadIdx.x} * kPiece; i < n; i += int64_t{blockDim.x} * kPiece) {
      body(0, i);
    }
  }
}

/// Combines one value per thread of a block, whose size is a multiple of 32, in a fixed order; all
/// threads get the result. `shared` has 32 words and may be used again after the next barrier.
template <typename T, typename Combine>
__device__ __forceinline__ T reduce_block(T value, T neutral, T* shared, const Combine& combine) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  if (threadIdx.x % 32 == 0) {
    shared[threadIdx.x / 32] = value;
  }
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : neutral;
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

/// Rounds and stores one row. load(p, i) gives the eight values from element i on.
template <int kPieces, typename Load>
__device__ __forceinline__ void store_row(const QuantizedRows& out,
                                          int64_t row,
                                          int64_t n,
                                          const Load& load) {
  if (out.format == ActFormat::kBf16) {
    __nv_bfloat16* values = static_cast<__nv_bfloat16*>(out.values) + row * n;
    for_each_piece<kPieces>(n, [&](int p, int64_t i) { store_bf16x8(values + i, load(p, i)); });
    return;
  }
  F32x8 kept[kPieces > 0 ? kPieces : 1];
  uint32_t largest = 0;  // bits of magnitudes: integers order them as floats do, NaN on top
  for_each_piece<kPieces>(n, [&](int p, int64_t i) {
    kept[p] = load(p, i);
#pragma unroll
    for (const float x : kept[p].v) {
      largest = max(largest, __float_as_uint(x) & 0x7fffffffU);
    }
  });
  __shared__ uint32_t shared[32];
  largest = reduce_block(largest, 0U, shared, [](uint32_t a, uint32_t b) { return max(a, b); });

  const float absmax = __uint_as_float(largest < 0x7f800000U ? largest : 0x7fc00000U);
  const bool integer = out.format == ActFormat::kInt8Token;
  const float top = integer ? 127.0F : 448.0F;
  const float quotient = top / absmax;
  const float factor = quotient < __uint_as_float(0x7f800000U) ? quotient : 0.0F;
  if (threadIdx.x == 0) {
    out.scales[row] = absmax / top;
  }
  uint8_t* values = static_cast<uint8_t*>(out.values) + row * n;
  for_each_piece<kPieces>(n, [&](int p, int64_t i) {
    const F32x8 x = kPieces > 0 ? kept[p] : load(p, i);
    *reinterpret_cast<uint2*>(values + i) =
        integer ? make_uint2(int8x4_bits(x.v, factor), int8x4_bits(x.v + 4, factor))
                : make_uint2(e4m3x4_bits(x.v, factor), e4m3x4_bits(x.v + 4, factor));
  });
}

/// What a launch over rows looks like. Depends on n alone, so that sums have one order.
struct RowShape {
  int pieces = 0;  // kPieces: 1, 2, 4 or 0
  unsigned threads = 0;
};

inline RowShape row_shape(int64_t n) {
  const int64_t pieces = n / kPiece;
  const int64_t each = pieces <= 512 ? 1 : pieces <= 1024 ? 2 : 4;
  if (pieces > 4 * kMaxRowThreads) {
    return {0, kMaxRowThreads};
  }
  return {static_cast<int>(each),
          static_cast<unsigned>(((pieces + each - 1) / each + 31) / 32 * 32)};
}

/// Whether `out` can take rows of n elements.
inline bool can_store(const QuantizedRows& out, int64_t rows, int64_t n) {
  const bool tokens = out.format == ActFormat::kInt8Token || out.format == ActFormat::kFp8Token;
  return rows >= 0 && rows <= INT32_MAX && row_width_ok(n) &&
         (tokens || out.format == ActFormat::kBf16);
}

/// Launches the instance of a row kernel that fits n, one block per row.
///   kernels: instances for 0, 1, 2 and 4 pieces
template <typename Args>
cudaError_t launch_rows(void (*const (&kernels)[4])(Args),
                        const Args& args,
                        const LaunchContext& context) {
  if (args.rows == 0) {
    return cudaSuccess;
  }
  const RowShape shape = row_shape(args.n);
  const Grid grid{.blocks = dim3(static_cast<unsigned>(args.rows)), .threads = shape.threads};
  return launch(kernels[shape.pieces == 4 ? 3 : shape.pieces], grid, context, args);
}

}  // namespace nibble::cuda
