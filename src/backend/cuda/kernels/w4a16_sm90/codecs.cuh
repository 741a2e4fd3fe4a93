#pragma once

#include <cstdint>

#include "backend/cuda/kernels/w4a16_sm90/layout.cuh"
#include "backend/cuda/ptx/memory.cuh"

// How the words of Int4GroupLayout become weights. Weights are kShrink times what they are until
// all products are summed up, so that the factors fit. A word has eight codes: register i of a
// fragment takes one of the low half and one of the high half, times the scale of row i % 2.
namespace nibble::cuda {

/// INT4 in groups of kGroup_. A byte alone in a BF16 is that integer times 2^-133, also where it
/// reaches into the exponent: a code, or 16 codes, becomes a weight by one exact product and one
/// exact offset, rounded once. Eight weights take five integer and four floating-point operations.
template <int kGroup_>
struct Int4Codec {
  static constexpr int kGroup = kGroup_;
  using Layout = Int4GroupLayout<kGroup>;
  static constexpr int kScales = kGroup == 32 ? 2 : 1;  // of a unit's groups
  static constexpr float kShrink = 0x1p-40F;
  static constexpr uint32_t kFactors = 0x6c006e00U;  // 2^89, 2^93
  static constexpr uint32_t kOffsets = 0xad00ad00U;  // -8 kShrink

  // What a code is multiplied by and what is added, for each group of a unit.
  struct Terms {
    uint32_t factors[kScales], offsets[kScales];
    __device__ __forceinline__ explicit Terms(const uint32_t (&scales)[kScales]) {
#pragma unroll
      for (int g = 0; g < kScales; ++g) {
        factors[g] = ptx::mul_bf16x2(scales[g], kFactors);
        offsets[g] = ptx::mul_bf16x2(scales[g], kOffsets);
      }
    }
  };

  static __device__ __forceinline__ void decode(uint32_t word,
                                                const Terms& terms,
                                                int g,
                                                uint32_t (&a)[4]) {
    const uint32_t factors = terms.factors[g], offsets = terms.offsets[g];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = word >> (i / 2 * 8) & (i % 2 == 0 ? 0x000f000fU : 0x00f000f0U);
      a[i] = i % 2 == 0
                 ? ptx::fma_bf16x2(codes, ptx::low_twice(factors), ptx::low_twice(offsets))
                 : ptx::fma_bf16x2(codes, ptx::high_twice(factors), ptx::high_twice(offsets));
    }
  }

  /// A packed word of its codes, code i of either half at bit 4 i, and back.
  static __host__ __device__ constexpr uint32_t place(uint32_t codes) { return codes; }
  static __host__ __device__ constexpr uint32_t codes_of(uint32_t word) { return word; }
};

/// E2M1 with a power of two for each 32 of K: sign and the other bits of a code, put where BF16 has
/// its sign and the bits above and below the point, are the value times 2^-126, subnormal ones too,
/// and one product is the weight, exactly. Eight weights take eleven integer and four
/// floating-point operations. Scales up to 2^41; larger ones give NaN.
struct Fp4Codec {
  static constexpr int kGroup = 32;
  using Layout = Int4GroupLayout<kGroup>;
  static constexpr int kScales = 2;
  static constexpr float kShrink = 0x1p-40F;
  static constexpr uint32_t kFactor = 0x6a806a80U;  // 2^126 kShrink

  struct Terms {
    uint32_t factors[kScales];
    __device__ __forceinline__ explicit Terms(const uint32_t (&scales)[kScales]) {
#pragma unroll
      for (int g = 0; g < kScales; ++g) {
        factors[g] = ptx::mul_bf16x2(scales[g], kFactor);
      }
    }
  };

  static __device__ __forceinline__ void decode(uint32_t word,
                                                const Terms& terms,
                                                int g,
                                                uint32_t (&a)[4]) {
    constexpr uint32_t kSign = 0x80008000U, kRest = 0x01c001c0U;
    const uint32_t even = ptx::low_twice(terms.factors[g]), odd = ptx::high_twice(terms.factors[g]);
    a[0] = ptx::mul_bf16x2((word << 5 & kSign) | (word & kRest), even);
    a[1] = ptx::mul_bf16x2(word << 3 & (kSign | kRest), odd);
    a[2] = ptx::mul_bf16x2(word << 6 & (kSign | kRest), even);
    a[3] = ptx::mul_bf16x2((word << 4 & kSign) | (word >> 7 & kRest), odd);
  }

  // Lowest bits of the codes' magnitudes and their signs, in either half of a word.
  static __host__ __device__ constexpr uint32_t place(uint32_t codes) {
    constexpr int kAt[] = {6, 3, 0, 13}, kSignAt[] = {10, 12, 9, 11};
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) {
      const uint32_t code = codes >> (4 * i) & 15U;
      const int half = i / 4 * 16;
      word |= (code & 7U) << (half + kAt[i % 4]) | (code >> 3) << (half + kSignAt[i % 4]);
    }
    return word;
  }
  static __host__ __device__ constexpr uint32_t codes_of(uint32_t word) {
    constexpr int kAt[] = {6, 3, 0, 13}, kSignAt[] = {10, 12, 9, 11};
    uint32_t codes = 0;
    for (int i = 0; i < 8; ++i) {
      const int half = i / 4 * 16;
      const uint32_t magnitude = word >> (half + kAt[i % 4]) & 7U;
      codes |= (magnitude | (word >> (half + kSignAt[i % 4]) & 1U) << 3) << (4 * i);
    }
    return codes;
  }
};
static_assert(Fp4Codec::codes_of(Fp4Codec::place(0x89abcdefU)) == 0x89abcdefU);
static_assert(Fp4Codec::codes_of(Fp4Codec::place(0x01234567U)) == 0x01234567U);

}  // namespace nibble::cuda
