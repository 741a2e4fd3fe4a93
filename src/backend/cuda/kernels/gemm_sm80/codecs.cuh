#pragma once

// How the weights of gemm_sm80/mma.cuh are coded: what the chunks of a lane hold, and how they
// become operands. decode(plane, half, s, a): the operand of rows 16 half to 16 half + 15 of the
// warp and of product s of the plane.

#include <cstdint>

#include <cuda_bf16.h>

#include "backend/cuda/ptx/mma.cuh"
#include "backend/cuda/ptx/mma_fp8.cuh"
#include "backend/cuda/ptx/mma_s8.cuh"
#include "quant/scheme.h"

namespace nibble::cuda::sm80 {

inline constexpr int kTileRows = 128;
inline constexpr int kStep = 64;  // of k

__device__ __forceinline__ uint32_t word_of(const uint4& chunk, int i) {
  return i == 0 ? chunk.x : i == 1 ? chunk.y : i == 2 ? chunk.z : chunk.w;
}

/// Where an element of a packed word comes from, within its block of 128 rows and 64 of k.
struct Source {
  int row = 0;
  int column = 0;
};

/// Element `j` of operand word `i` (as mma.cuh numbers them) of a lane.
///   element_bytes: of an activation
constexpr Source operand_source(
    int lane, int half, int plane, int s, int i, int j, int element_bytes) {
  return {.row = half * 16 + lane / 4 + 8 * (i & 1),
          .column = (plane * 64 + lane % 4 * 16 + s * 8 + (i >> 1) * 4) / element_bytes + j};
}

/// What weights have beside their scales: each codec's kOffsets.
enum class Offsets { kNone, kZeros, kMinimums };

/// Whole operand words: eight bits or sixteen per weight.
template <int kPlaneCount>
struct WholeWords {
  static constexpr int kPlanes = kPlaneCount;
  static constexpr int kChunks = 4 * kPlanes;
  static constexpr int kCodeBits = 8 * kPlanes;
  static constexpr int kGroupsPerStep = 0;
  static constexpr int kGroup = kStep;
  static constexpr uint32_t kFlip = 0;

  struct Fragments {
    uint4 chunks[kChunks];  // [plane][half][s]
    __device__ __forceinline__ void decode(int plane, int half, int s, uint32_t (&a)[4]) const {
      const uint4& chunk = chunks[(plane * 2 + half) * 2 + s];
      a[0] = chunk.x;
      a[1] = chunk.y;
      a[2] = chunk.z;
      a[3] = chunk.w;
    }
  };

  static constexpr Source source(int lane, int chunk, int word, int element) {
    return operand_source(lane, chunk / 2 % 2, chunk / 4, chunk % 2, word, element, kPlanes);
  }
};

/// What codecs have unless they say otherwise: groups with scales in BF16, activations without.
struct PlainGroups {
  using GroupScale = __nv_bfloat16;
  static constexpr Offsets kOffsets = Offsets::kNone;
  static constexpr bool kTokenGroups = false;  // activations have a scale per token and group
  static constexpr bool kSumsApart = false;    // a step's sums are added in F32, with groups or not
};

struct IntegerSums : PlainGroups {
  using Sum = int32_t;
  static constexpr bool kRowScales = true;
  static constexpr bool kTokenScales = true;
  __device__ static __forceinline__ void multiply(int32_t (&sum)[4],
                                                  const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
    ptx::warp_mma_s8(sum, a, b);
  }
};

struct FloatSums : PlainGroups {
  using Sum = float;
  static constexpr bool kRowScales = false;
  static constexpr bool kTokenScales = false;
  static constexpr float kCodeUnit = 1.0F;
  __device__ static __forceinline__ void multiply(float (&sum)[4],
                                                  const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
    ptx::warp_mma_bf16(sum, a, b);
  }
};

struct CodecW8A8 : WholeWords<1>, IntegerSums {
  static constexpr float kCodeUnit = 1.0F;
};

struct CodecBf16 : WholeWords<2>, FloatSums {};

/// E4M3 against E4M3. Tensor cores that take FP8 from a warp (sm_89) keep about 14 bits of a
/// running sum, so each step's 64 products are summed apart and added in F32. Those of Hopper have
/// no such instruction: there the compiler widens both operands to FP16, whose products are exact
/// and summed in F32.
struct CodecFp8 : WholeWords<1>, FloatSums {
  static constexpr bool kRowScales = true;
  static constexpr bool kTokenScales = true;
  static constexpr bool kSumsApart = true;
  __device__ static __forceinline__ void multiply(float (&sum)[4],
                                                  const uint32_t (&a)[4],
                                                  const uint32_t (&b)[2]) {
    ptx::warp_mma_e4m3(sum, a, b);
  }
};

/// The same with scales for 128 of k, of weights as of activations. Weights are scaled in blocks of
/// as many rows, but each row has its scales here: matrices that are stacked need not begin with a
/// tile.
struct CodecFp8Groups : CodecFp8 {
  using GroupScale = float;
  static constexpr bool kRowScales = false;
  static constexpr bool kTokenScales = false;
  static constexpr bool kTokenGroups = true;
  static constexpr int kGroupsPerStep = 1;
  static constexpr int kGroup = 128;  // the last one may be half as long
};

/// Four bits against int8: a nibble in the upper half of a byte is 16 times its value, and the
/// scale a sixteenth. Words are two's complement: even nibbles for operand words 0 and 2, odd ones
/// for 1 and 3.
struct CodecW4A8 : IntegerSums {
  static constexpr int kPlanes = 1;
  static constexpr int kChunks = 2;
  static constexpr int kCodeBits = 4;
  static constexpr int kGroupsPerStep = 0;
  static constexpr int kGroup = kStep;
  static constexpr float kCodeUnit = 0.0625F;
  static constexpr uint32_t kFlip = 0x88888888U;  // canonical codes are offset by 8

  struct Fragments {
    uint4 chunks[kChunks];  // [half], words [s][r]
    __device__ __forceinline__ void decode(int, int half, int s, uint32_t (&a)[4]) const {
      const uint32_t low = word_of(chunks[half], 2 * s);
      const uint32_t high = word_of(chunks[half], 2 * s + 1);
      a[0] = (low << 4) & 0xf0f0f0f0U;
      a[1] = low & 0xf0f0f0f0U;
      a[2] = (high << 4) & 0xf0f0f0f0U;
      a[3] = high & 0xf0f0f0f0U;
    }
  };

  static constexpr Source source(int lane, int chunk, int word, int element) {
    return operand_source(lane, chunk, 0, word / 2, word % 2 * 2 + element % 2, element / 2, 1);
  }
};

/// Four bits against bf16: 0x4300 + code is 128 + code in bf16, and 136 less its value, exactly.
/// Nibble i is the lower and nibble i + 4 the upper half of operand word i. Groups are scaled in
/// f32 after their products, so that no weight is rounded. With zero points, 136 plus those of two
/// rows are taken away instead, which bf16 also has. With minimums 128 is taken away, so that codes
/// count from 0; their products with the minimums are added as those of 1 are.
template <int kGroupSize, Offsets kGiven = Offsets::kNone>
struct CodecW4A16 : FloatSums {
  static constexpr Offsets kOffsets = kGiven;
  static constexpr int kPlanes = 2;
  static constexpr int kChunks = 2;
  static constexpr int kCodeBits = 4;
  static constexpr int kGroup = kGroupSize;
  static constexpr int kGroupsPerStep = kGroupSize == 32 ? 2 : 1;  // a step may be half a group
  static constexpr uint32_t kFlip = 0;

  struct Fragments {
    uint4 chunks[kChunks];  // [plane], words [half][s]
    __device__ __forceinline__ void decode(int plane, int half, int s, uint32_t (&a)[4]) const {
      constexpr float kZero = kOffsets == Offsets::kMinimums ? -8.0F : 0.0F;
      const float zeros[2] = {kZero, kZero};
      decode(plane, half, s, zeros, a);
    }
    /// `zeros` are those of rows g and g + 8 of the half.
    __device__ __forceinline__ void decode(
        int plane, int half, int s, const float (&zeros)[2], uint32_t (&a)[4]) const {
      const uint32_t word = word_of(chunks[plane], half * 2 + s);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t shifted = ((word >> (4 * i)) & 0x000f000fU) | 0x43004300U;
        const __nv_bfloat162 value = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&shifted),
                                             __float2bfloat162_rn(136.0F + zeros[i & 1]));
        a[i] = *reinterpret_cast<const uint32_t*>(&value);
      }
    }
  };

  static constexpr Source source(int lane, int chunk, int word, int element) {
    return operand_source(lane, word / 2, chunk, word % 2, element % 4, element / 4, 2);
  }
};

/// The same with a scale per channel, which multiplies the sum once.
struct CodecW4A16Channel : CodecW4A16<128> {
  static constexpr bool kRowScales = true;
  static constexpr int kGroupsPerStep = 0;
  static constexpr int kGroup = kStep;
};

/// E2M1 against bf16: its exponent and mantissa at their places in bf16, with the sign above, are
/// 2^-126 of the number, subnormal ones too. Scales are powers of two.
struct CodecFp4A16 : CodecW4A16<32> {
  struct Fragments {
    uint4 chunks[kChunks];  // [plane], words [half][s]
    __device__ __forceinline__ void decode(int plane, int half, int s, uint32_t (&a)[4]) const {
      constexpr uint32_t kFactors = 0x7e807e80U;  // 2^126, twice
      const uint32_t word = word_of(chunks[plane], half * 2 + s);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t shifted = word >> (4 * i);
        const uint32_t small = ((shifted & 0x00070007U) << 6) | ((shifted & 0x00080008U) << 12);
        const __nv_bfloat162 value = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&small),
                                             *reinterpret_cast<const __nv_bfloat162*>(&kFactors));
        a[i] = *reinterpret_cast<const uint32_t*>(&value);
      }
    }
  };
};

/// Eight bits against bf16: 0x4300 with the lower seven bits of a code is 128 + those, and 0x4300
/// with its sign bit is 128, or 256 where that is set: their difference is the code, exactly.
/// Bytes 0 and 2 of a word are an operand word, bytes 1 and 3 the next one. A scale per channel, or
/// for groups of 32.
template <ScalePer kPer>
struct CodecW8A16 : FloatSums {
  static_assert(kPer == ScalePer::kChannel || kPer == ScalePer::kGroup);
  static constexpr bool kRowScales = kPer == ScalePer::kChannel;
  static constexpr int kPlanes = 2;
  static constexpr int kChunks = 4;
  static constexpr int kCodeBits = 8;
  static constexpr int kGroupsPerStep = kRowScales ? 0 : 2;
  static constexpr int kGroup = kRowScales ? kStep : 32;
  static constexpr uint32_t kFlip = 0;

  struct Fragments {
    uint4 chunks[kChunks];  // [plane][half], words [s][a pair of operand words]
    __device__ __forceinline__ void decode(int plane, int half, int s, uint32_t (&a)[4]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = word_of(chunks[plane * 2 + half], 2 * s + i);
        a[2 * i] = two_codes(word);
        a[2 * i + 1] = two_codes(word >> 8);
      }
    }

   private:
    __device__ static __forceinline__ uint32_t two_codes(uint32_t word) {
      const uint32_t low = (word & 0x007f007fU) | 0x43004300U;
      const uint32_t sign = (word & 0x00800080U) | 0x43004300U;
      const __nv_bfloat162 value = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low),
                                           *reinterpret_cast<const __nv_bfloat162*>(&sign));
      return *reinterpret_cast<const uint32_t*>(&value);
    }
  };

  static constexpr Source source(int lane, int chunk, int word, int element) {
    return operand_source(lane, chunk % 2, chunk / 2, word / 2, word % 2 * 2 + element % 2,
                          element / 2, 2);
  }
};

}  // namespace nibble::cuda::sm80
