#pragma once

#include <cstdint>

#include "backend/cuda/kernels/gemm_sm90/pack.cuh"

// INT4 weights with one scale for each channel as operands of products with INT8 and with BF16.
namespace nibble::cuda {

/// Against INT8. A weight becomes an int8 operand in the high half of a byte, 16 times its value,
/// in one operation for four of them (COMET, section 4: zero extension by position); the scale
/// makes up for it, which is exact. |sum| <= 16 * 8 * 127 k fits an int32 for k up to 132104.
///
/// A unit is 64 rows x 128 of K. Byte b of a 32-bit word is element 4 (t % 4) + b of half a K step:
/// the low nibble of the even channel, the high one of the odd, in two's complement.
struct Int4Codec : HalvesCodec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kInt8;
  static constexpr int kBlockElements = 128;
  static constexpr int kUnitWords = kUnitBytes / 4;
  static constexpr float kScale = 1.0F / 16.0F;

  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
    expand_words(fetched, a, [](uint32_t word, uint32_t* to) {
      to[0] = (word << 4) & 0xf0f0f0f0U;
      to[1] = word & 0xf0f0f0f0U;
    });
  }

  /// Word `index` of a unit. four(row, column): codes of four of its columns from one on.
  template <typename Four>
  static __device__ __forceinline__ uint32_t word(int index, const Four& four) {
    const int thread = (index >> 2) & 127;
    const int step = 2 * (index >> 9) + ((index & 3) >> 1);
    const int column = 32 * step + 16 * (index & 1) + 4 * (thread & 3);
    uint32_t result = 0;
    for (int odd = 0; odd < 2; ++odd) {
      const uint32_t codes = four(gemm_row(thread, odd), column);
      for (int b = 0; b < 4; ++b) {
        result |= (((codes >> (4 * b)) & 15U) ^ 8U) << (8 * b + 4 * odd);
      }
    }
    return result;
  }

  /// The inverse: codes of four columns of a row of a unit.
  static __device__ __forceinline__ uint32_t four(const uint32_t* unit, int row, int column) {
    const int step = column / 32;
    const uint32_t word =
        unit[step / 2 * 512 + gemm_thread(row, column) * 4 + step % 2 * 2 + column / 16 % 2];
    uint32_t codes = 0;
    for (int b = 0; b < 4; ++b) {
      codes |= (((word >> (8 * b + 4 * (row % 2))) & 15U) ^ 8U) << (4 * b);
    }
    return codes;
  }
};

/// Against BF16. A byte alone in a BF16 is that integer times 2^-133: a code, or 16 codes, becomes
/// a weight by one exact product and one exact offset. Eight weights take seven integer and four
/// floating-point operations. They are 2^-40 times what they are, so that the factors fit; kScale
/// puts sums right.
///
/// A unit is 64 rows x 64 of K, for each thread one word of 32 bits for each K step: nibble i is
/// the even element of operand register i, nibble 4 + i the odd one.
struct Int4ToBf16Codec {
  static constexpr ptx::MmaType kType = ptx::MmaType::kBf16;
  static constexpr int kUnitBytes = 2048;
  static constexpr int kUnitWords = kUnitBytes / 4;
  static constexpr int kBlockElements = 64;
  static constexpr float kScale = 0x1p40F;
  static constexpr bool kRowScales = true;

  using Fetched = uint4;
  static __device__ __forceinline__ Fetched fetch(uint32_t unit, int thread) {
    return ptx::load_shared16(unit + thread * 16);
  }
  static __device__ __forceinline__ void expand(const Fetched& fetched, uint32_t (&a)[4][4]) {
    constexpr uint32_t kLow = 0x6e006e00U, kHigh = 0x6c006c00U;  // 2^93, 2^89
    constexpr uint32_t kOffsets = 0xad00ad00U;                   // -8 * 2^-40
    const uint32_t words[4] = {fetched.x, fetched.y, fetched.z, fetched.w};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint32_t low = words[step], high = low >> 8;
      a[step][0] = ptx::fma_bf16x2(low & 0x000f000fU, kLow, kOffsets);
      a[step][1] = ptx::fma_bf16x2(low & 0x00f000f0U, kHigh, kOffsets);
      a[step][2] = ptx::fma_bf16x2(high & 0x000f000fU, kLow, kOffsets);
      a[step][3] = ptx::fma_bf16x2(high & 0x00f000f0U, kHigh, kOffsets);
    }
  }

  /// Word `index` of a unit. two(row, column): codes of two of its columns from one on.
  template <typename Two>
  static __device__ __forceinline__ uint32_t word(int index, const Two& two) {
    const int thread = index / 4, step = index % 4;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = two(gemm_row(thread, i % 2), 16 * step + 2 * (thread & 3) + i / 2 * 8);
      result |= (codes & 15U) << (4 * i) | (codes >> 4) << (4 * i + 16);
    }
    return result;
  }

  /// The inverse: codes of two columns of a row of a unit.
  static __device__ __forceinline__ uint32_t two(const uint32_t* unit, int row, int column) {
    const int i = row % 2 + column / 8 % 2 * 2;
    const uint32_t word = unit[gemm_thread(row, 2 * column) * 4 + column / 16] >> (4 * i);
    return (word & 15U) | (word >> 16 & 15U) << 4;
  }
};

/// Codes [n, k] of INT4 in device memory, two in a byte, k a multiple of eight.
struct Int4Codes {
  const uint32_t* words = nullptr;
  int64_t n = 0, k = 0;

  /// Of `count` columns of a row from one on, that are within eight; code 8, a weight of 0, beyond
  /// the matrix.
  template <int kCount>
  [[nodiscard]] __device__ __forceinline__ uint32_t at(int64_t row, int64_t column) const {
    constexpr uint32_t kMask = (1U << (4 * kCount)) - 1;
    return row < n && column >= 0 && column < k
               ? words[row * (k / 8) + column / 8] >> (4 * (column % 8)) & kMask
               : 0x88888888U & kMask;
  }
};

}  // namespace nibble::cuda
