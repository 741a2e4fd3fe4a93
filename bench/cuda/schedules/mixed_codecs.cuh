#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/int4.cuh"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/wgmma.cuh"
#include "bench/cuda/schedules/mixed_gemm.h"

// Operands of wgmma from INT4 weights of one step: 64 rows x 128 bytes of x along K, which is 128
// weights of a row for INT8 activations (two's complement) and 64 for BF16 ones (plus 8). Of
// each there is what the products use and what it is compared with. Units lie 4096 bytes apart in
// shared memory; BF16's take half of that.
namespace nibble::cuda {

/// Four nibbles in the low halves of bytes, two's complement, to bytes of the same value.
__device__ __forceinline__ uint32_t extend_signs(uint32_t low_halves) {
  return (low_halves & 0x08080808U) * 0x1eU + low_halves;
}

/// Operand registers 2 h and 2 h + 1 of half a K step from the codes of two rows: nibble 2 b is
/// element b of the even row, nibble 2 b + 1 of the odd one.
template <Widening kWidening>
__device__ __forceinline__ void widen_int8(uint32_t word, uint32_t* to) {
  if constexpr (kWidening == Widening::kZeros) {
    to[0] = (word << 4) & 0xf0f0f0f0U;
    to[1] = word & 0xf0f0f0f0U;
  } else {
    to[0] = extend_signs(word & 0x0f0f0f0fU);
    to[1] = extend_signs((word >> 4) & 0x0f0f0f0fU);
  }
}

/// Two weights, nibbles at bits 0 and 16, as BF16 (Int4ToBf16Codec).
__device__ __forceinline__ uint32_t widen_low(uint32_t word) {
  return ptx::fma_bf16x2(word & 0x000f000fU, 0x6e006e00U, 0xad00ad00U);
}

/// A byte of shared memory.
__device__ __forceinline__ uint8_t load_shared1(uint32_t address) {
  uint32_t value = 0;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return static_cast<uint8_t>(value);
}

template <typename Value>
struct PlainWeights {  // of four K steps, as many operand registers
  Value v[4][4];
};

template <WeightOrder kOrder, Widening kWidening>
struct MixedInt8Codec;
template <WeightOrder kOrder>
struct MixedBf16Codec;

template <Widening kWidening>
struct MixedInt8Codec<WeightOrder::kInterleaved, kWidening> : HalvesCodec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kInt8;
  static constexpr int kPackedBytes = kUnitBytes;
  static constexpr float kScale = kWidening == Widening::kZeros ? 1.0F / 16.0F : 1.0F;
  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
    expand_words(fetched, a, [](uint32_t word, uint32_t* to) { widen_int8<kWidening>(word, to); });
  }
};

/// Rows of 64 bytes: the four weights of a register are two bytes of a row.
template <Widening kWidening>
struct MixedInt8Codec<WeightOrder::kPlain, kWidening> {
  static constexpr ptx::MmaType kType = ptx::MmaType::kInt8;
  static constexpr int kUnitBytes = 4096, kPackedBytes = 4096;
  static constexpr float kScale = kWidening == Widening::kZeros ? 1.0F / 16.0F : 1.0F;
  using Fetched = PlainWeights<uint16_t>;

  static __device__ __forceinline__ Fetched fetch(uint32_t unit, int thread) {
    const uint32_t row = unit + (16 * (thread >> 5) + 2 * (thread >> 2 & 7)) * 64;
    Fetched fetched;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fetched.v[step][i] =
            ptx::load_shared2(row + i % 2 * 64 + 16 * step + i / 2 * 8 + 2 * (thread & 3));
      }
    }
    return fetched;
  }
  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t twice = __byte_perm(fetched.v[step][i], 0, 0x1100);  // each byte twice
        if constexpr (kWidening == Widening::kZeros) {
          a[step][i] = ((twice << 4) & 0x00f000f0U) | (twice & 0xf000f000U);
        } else {
          a[step][i] = extend_signs((twice & 0x000f000fU) | ((twice >> 4) & 0x0f000f00U));
        }
      }
    }
  }
};

template <>
struct MixedBf16Codec<WeightOrder::kInterleaved> : Int4ToBf16Codec {
  static constexpr int kUnitBytes = 4096, kPackedBytes = Int4ToBf16Codec::kUnitBytes;
};

/// Rows of 32 bytes: the two weights of a register are one byte.
template <>
struct MixedBf16Codec<WeightOrder::kPlain> {
  static constexpr ptx::MmaType kType = ptx::MmaType::kBf16;
  static constexpr int kUnitBytes = 4096, kPackedBytes = 2048;
  using Fetched = PlainWeights<uint8_t>;

  static __device__ __forceinline__ Fetched fetch(uint32_t unit, int thread) {
    const uint32_t row = unit + (16 * (thread >> 5) + 2 * (thread >> 2 & 7)) * 32;
    Fetched fetched;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        fetched.v[step][i] = load_shared1(row + i % 2 * 32 + 8 * step + i / 2 * 4 + (thread & 3));
      }
    }
    return fetched;
  }
  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t two = fetched.v[step][i];
        a[step][i] = widen_low(two | two << 12);
      }
    }
  }
};

}  // namespace nibble::cuda
