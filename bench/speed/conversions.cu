// What makes operands of weights of 4 bits, each way in a kernel of its own, for conversions.py to
// count in the machine code. Every kernel loads the same words of eight weights and stores the
// operands.

#include <cstdint>

namespace {

constexpr uint32_t kLow = 0x0f0f0f0fU, kHigh = 0xf0f0f0f0U, kSigns = 0x80808080U;

/// Nothing: what the others are counted against.
struct Nothing {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t word,
                                                 uint32_t parameter,
                                                 uint32_t (&out)[kWords]) {
    out[0] = word;
    out[1] = word;
  }
};

/// INT4 to INT8, 16 times the value, by its place (w4a8, w4ax).
struct Int4ToInt8ByPlace {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t word,
                                                 uint32_t parameter,
                                                 uint32_t (&out)[kWords]) {
    out[0] = word << 4 & kHigh;
    out[1] = word & kHigh;
  }
};

/// INT4 to INT8 with the sign of each code extended.
struct Int4ToInt8BySign {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t word,
                                                 uint32_t parameter,
                                                 uint32_t (&out)[kWords]) {
    out[0] = (((word & kLow) ^ 0x08080808U) + 0x78787878U) ^ kSigns;
    out[1] = (((word >> 4 & kLow) ^ 0x08080808U) + 0x78787878U) ^ kSigns;
  }
};

/// INT4 above a zero point times an integer scale of its group (w4a8_g64, w4a8_g128).
struct Int4ToInt8InLevels {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t word,
                                                 uint32_t parameter,
                                                 uint32_t (&out)[kWords]) {
    const uint32_t step = parameter & 15, offsets = parameter * 0x01010101U;
    out[0] = ((word & kLow) * step + offsets) ^ kSigns;
    out[1] = ((word >> 4 & kLow) * step + offsets) ^ kSigns;
  }
};

/// INT4 to E4M3, a sign and three bits that were put in place before.
struct Int4ToE4M3 {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t word,
                                                 uint32_t parameter,
                                                 uint32_t (&out)[kWords]) {
    out[0] = word & 0x87878787U;
    out[1] = __funnelshift_r(word, word, 4) & 0x87878787U;
  }
};

/// INT4 to BF16, times the scale of its group (w4a16).
struct Int4ToBf16 {
  static constexpr int kWords = 4;
  static __device__ __forceinline__ void convert(uint32_t word,
                                                 uint32_t parameter,
                                                 uint32_t (&out)[kWords]) {
    const uint32_t factors = parameter | 0x6c006e00U, offsets = parameter | 0xad00ad00U;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint32_t codes = word >> (i / 2 * 8) & (i % 2 == 0 ? 0x000f000fU : 0x00f000f0U);
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out[i]) : "r"(codes), "r"(factors), "r"(offsets));
    }
  }
};

/// E2M1 to E4M3 by a table of the group's eight magnitudes (mxfp4_fp8).
struct Fp4ToE4M3 {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void convert(uint32_t word,
                                                 uint32_t parameter,
                                                 uint32_t (&out)[kWords]) {
    const uint32_t low = parameter * 0x01030507U, high = parameter * 0x0b0d1113U;
    const uint32_t magnitudes = word & 0x77777777U;
    out[0] = __byte_perm(low, high, magnitudes) | (word << 4 & kSigns);
    out[1] = __byte_perm(low, high, magnitudes >> 16) | (word & kSigns);
  }
};

/// E2M1 to INT8, twice the value: magnitudes and their negatives by two tables, signs choose.
struct Fp4ToInt8 {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ uint32_t four(uint32_t codes, uint32_t parameter) {
    // In registers, as in a loop.
    const uint32_t positive[2] = {0x03020100U ^ parameter, 0x0c080604U ^ parameter};
    const uint32_t opposite[2] = {0xfdfeff00U ^ parameter, 0xf4f8fafcU ^ parameter};
    const uint32_t all = 0xff00U ^ parameter;
    const uint32_t magnitudes = codes & 0x7777U;
    const uint32_t negative = __byte_perm(all, 0, codes >> 3 & 0x1111U);
    const uint32_t up = __byte_perm(positive[0], positive[1], magnitudes);
    const uint32_t down = __byte_perm(opposite[0], opposite[1], magnitudes);
    return (up & ~negative) | (down & negative);
  }
  static __device__ __forceinline__ void convert(uint32_t word,
                                                 uint32_t parameter,
                                                 uint32_t (&out)[kWords]) {
    out[0] = four(word, parameter);
    out[1] = four(word >> 16, parameter);
  }
};

constexpr int kConverted = 32;  // words of a thread

}  // namespace

template <typename Conversion>
__global__ void converted(const uint4* words, uint32_t* out, uint32_t parameter) {
  constexpr int kWords = Conversion::kWords;
#pragma unroll
  for (int i = 0; i < kConverted / 4; ++i) {
    const uint4 four = words[i];
    const uint32_t each[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t to[kWords];
      Conversion::convert(each[j], parameter, to);
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        out[(4 * i + j) * kWords + w] = to[w];
      }
    }
  }
}

#define COUNT(conversion) \
  template __global__ void converted<conversion>(const uint4*, uint32_t*, uint32_t)
COUNT(Nothing);
COUNT(Int4ToInt8ByPlace);
COUNT(Int4ToInt8BySign);
COUNT(Int4ToInt8InLevels);
COUNT(Int4ToE4M3);
COUNT(Int4ToBf16);
COUNT(Fp4ToE4M3);
COUNT(Fp4ToInt8);
