#pragma once

// Latents in 8 bits on sm_90a: how attention meets their codes.
//
// Scores: a query's 512 numbers become codes of the same kind, each a high and a low one, so that
// products of codes lose next to nothing; the rotated part is multiplied in bf16. Values: codes
// become fp16 in registers, where they are the operand of 64 rows, two neighbouring numbers of a
// lane in rows g and g + 8; weights are multiplied by the scales of their tokens instead, and enter
// totals without. So that weights fit fp16, the softmax is over scores to which log2 of the scale
// has been added.

#include <cuda_fp16.h>

#include "backend/cuda/kernels/latent/latent.cuh"
#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/wgmma_f16.cuh"

namespace nibble::cuda {

constexpr int kCodeSteps = kLatentValues / 32;                 // products over a row's codes
constexpr int kRopeSteps = (kLatentDim - kLatentValues) / 16;  // over its rotated key
using CodedOperand = LatentOperand<static_cast<int>(CodedRows::kGroup / 16)>;
using QueryCodes = LatentOperand<kLatentValues / 2>;  // rows of 512 bytes
using QueryRope = LatentOperand<kLatentDim - kLatentValues>;
constexpr int kInt4Chunk = 32;  // numbers of 16 bytes of a row in 4 bits

/// The lowest bytes of four words.
__device__ __forceinline__ uint32_t low_bytes(const uint32_t (&words)[4]) {
  return __byte_perm(__byte_perm(words[0], words[1], 0x0040),
                     __byte_perm(words[2], words[3], 0x0040), 0x5410);
}

/// Numbers of up to kTop become raise(high) + low. Where both sums take the same registers, that of
/// the codes that come first becomes its carry() before the others are added, and the whole counts
/// kCarried times.
struct Int8Latents {
  using Sum = int32_t;
  static constexpr ptx::MmaType kType = ptx::MmaType::kInt8;
  static constexpr float kTop = 127.0F * 128.0F;

  /// Four numbers, as bytes.
  static __device__ __forceinline__ uint2 split(const float (&x)[4]) {
    uint32_t high[4];
    uint32_t low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int whole = __float2int_rn(x[i]);
      const int upper = (whole + 64) >> 7;  // -127 to 127
      high[i] = static_cast<uint32_t>(upper);
      low[i] = static_cast<uint32_t>(whole - upper * 128);  // -64 to 63
    }
    return make_uint2(low_bytes(high), low_bytes(low));
  }
  /// A sum of high codes in units of low ones; with these it stays below 2^31.
  static __device__ __forceinline__ Sum raise(Sum high) { return high * 128; }
  static constexpr bool kHighFirst = true;
  static constexpr float kCarried = 1.0F;
  static __device__ __forceinline__ Sum carry(Sum high) { return raise(high); }
  /// Bytes 0 and 2, and bytes 1 and 3, as fp16.
  static __device__ __forceinline__ uint2 widen(uint32_t codes) {
    const __half2 offset = __halves2half2(__ushort_as_half(0x6480), __ushort_as_half(0x6480));
    const auto from = [&](uint32_t order) {  // 1024 + 128 + code, less that
      const uint32_t biased = __byte_perm(codes ^ 0x80808080U, 0x64646464U, order);
      const __half2 value = __hsub2(*reinterpret_cast<const __half2*>(&biased), offset);
      return *reinterpret_cast<const uint32_t*>(&value);
    };
    return make_uint2(from(0x4240), from(0x4341));
  }
};

struct Fp8Latents {
  using Sum = float;
  static constexpr ptx::MmaType kType = ptx::MmaType::kE4M3;
  static constexpr float kUnit = 16.0F;
  static constexpr float kTop = 448.0F * kUnit;

  static __device__ __forceinline__ uint2 split(const float (&x)[4]) {
    uint2 codes = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t high = ptx::narrow_e4m3(x[i] / kUnit, x[i + 1] / kUnit);
      const uint32_t wide = ptx::widen_e4m3(high);
      const float2 value = __half22float2(*reinterpret_cast<const __half2*>(&wide));
      const uint32_t low =
          ptx::narrow_e4m3(fmaf(value.x, -kUnit, x[i]), fmaf(value.y, -kUnit, x[i + 1]));
      codes.x |= high << (8 * i);
      codes.y |= low << (8 * i);
    }
    return codes;
  }
  static __device__ __forceinline__ Sum raise(Sum high) { return high * kUnit; }
  // Products of e4m3 are added with some 14 bits of the largest: small sums have to come first.
  static constexpr bool kHighFirst = false;
  static constexpr float kCarried = kUnit;
  static __device__ __forceinline__ Sum carry(Sum low) { return low / kUnit; }
  static __device__ __forceinline__ uint2 widen(uint32_t codes) {
    const uint32_t pairs = __byte_perm(codes, 0, 0x3120);
    return make_uint2(ptx::widen_e4m3(pairs & 0xffffU), ptx::widen_e4m3(pairs >> 16));
  }
};

/// The scale of a row, 1 where its codes are zeros.
__device__ __forceinline__ float row_scale(uint32_t address) {
  const float scale = __uint_as_float(ptx::load_shared4(address));
  return scale == 0.0F ? 1.0F : scale;
}

/// Where a lane reads values from a piece of 16 rows: two of the eight 16-byte chunks of a column,
/// its warp's and the fourth from there. The next column is 1024 bytes further.
template <typename Rows = CodedRows>
__device__ __forceinline__ uint32_t values_of_lane(int thread) {
  const int lane = thread % 32;
  const int row = lane % 8;
  const int chunk = lane / 16 * 4 + thread / 32;
  return static_cast<uint32_t>(lane / 8 % 2) * Rows::kGroup +
         static_cast<uint32_t>(row * 128 + (chunk ^ row) * 16);
}

/// Codes of two blocks of 64 numbers by 16 rows, as operands.
template <typename Codes>
__device__ __forceinline__ void widen_values(const uint32_t (&codes)[4],
                                             uint32_t (&first)[4],
                                             uint32_t (&second)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint2 one = Codes::widen(codes[i]);
    first[2 * i] = one.x;
    first[2 * i + 1] = one.y;
    const uint2 other = Codes::widen(codes[2 + i]);
    second[2 * i] = other.x;
    second[2 * i + 1] = other.y;
  }
  ptx::pin(first);
  ptx::pin(second);
}

}  // namespace nibble::cuda
