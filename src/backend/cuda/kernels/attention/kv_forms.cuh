#pragma once

// The forms of the cache that have kernels: how each is written and how it is read, a struct per
// form. Sizes come from kv_format(). CMakeLists.txt compiles decode and prefill for each struct.

#include <utility>

#include <cuda_fp16.h>

#include "backend/cuda/kv_layout.h"
#include "backend/cuda/ptx/memory.cuh"
#include "backend/cuda/ptx/mma.cuh"

namespace nibble::cuda {

constexpr float kStaticMiddle = 8.0F;  // the code of int4_static that stands for the mean

/// Elements of a head: kEach neighbours of its first half, as many of the second; kLanes lanes hold
/// any.
template <int kDim>
struct HeadValues {
  static constexpr int kEach = kDim >= 128 ? kDim / 64 : 2;
  static constexpr int kLanes = kDim / 2 / kEach;
  float v[2][kEach];
};

__device__ __forceinline__ float sum_warp(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value += __shfl_xor_sync(~0U, value, step);
  }
  return value;
}

__device__ __forceinline__ float max_warp(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0U, value, step));
  }
  return value;
}

// What codes of one token and head are multiplied by, and what is added: parameters as the cache
// has them.
__device__ __forceinline__ float scale_of(__half parameters) { return __half2float(parameters); }
__device__ __forceinline__ float scale_of(__half2 parameters) { return __low2float(parameters); }
__device__ __forceinline__ float offset_of(__half) { return 0.0F; }
__device__ __forceinline__ uint32_t bits_of(__half parameters) {
  return __half_as_ushort(parameters);
}
__device__ __forceinline__ uint32_t bits_of(__half2 parameters) {
  return __half_as_ushort(__low2half(parameters)) |
         static_cast<uint32_t>(__half_as_ushort(__high2half(parameters))) << 16;
}
__device__ __forceinline__ float offset_of(__half2 parameters) { return __high2float(parameters); }

/// A form has
///   kCapability       of the first GPUs that have its instructions, times 10
///   kBf16Operands     whether its elements are multiplied as BF16; else as FP16
///   fit(x, lane)      the parameters of a row [head_dim] over a warp, where it has any per token;
///                     NaN where a number is not finite, so that what is read of it is not either
///   codes(v, f, o)    neighbours' codes, the first lowest: of v * f, with an offset (v - o) * f
///   key_pair(w, p)    operand p of a word of K, see attention/fragments.cuh; integers as they are
///   value_pair(w, p)  as well of V
///   widen(c, p, v)    eight elements of K or V with their fp16 parameters, where BF16 has none
template <KvCode kCode>
struct KvForm;

template <>
struct KvForm<KvCode::kBf16> {
  static constexpr int kCapability = 80;
  static constexpr bool kBf16Operands = true;

  template <int kEach>
  static __device__ __forceinline__ uint64_t codes(const float (&v)[kEach], float, float) {
    uint64_t bits = 0;
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      bits |= static_cast<uint64_t>(ptx::pack_bf16(v[i], v[i + 1])) << (16 * i);
    }
    return bits;
  }
  static __device__ __forceinline__ uint32_t key_pair(uint32_t word, int) { return word; }
  static __device__ __forceinline__ uint32_t value_pair(uint32_t word, int) { return word; }
};

template <>
struct KvForm<KvCode::kFp8> {
  static constexpr int kCapability = 89;
  static constexpr bool kBf16Operands = false;

  template <int kEach>
  static __device__ __forceinline__ uint64_t codes(const float (&v)[kEach], float factor, float) {
    uint64_t bits = 0;
#pragma unroll
    for (int i = 0; i < kEach; i += 2) {
      bits |= static_cast<uint64_t>(ptx::narrow_e4m3(v[i] * factor, v[i + 1] * factor)) << (8 * i);
    }
    return bits;
  }
  static __device__ __forceinline__ uint32_t key_pair(uint32_t word, int p) {
    return ptx::widen_e4m3(p == 0 ? word : word >> 16);
  }
  static __device__ __forceinline__ uint32_t value_pair(uint32_t word, int p) {
    return ptx::widen_e4m3(__byte_perm(word, 0, p == 0 ? 0x4420 : 0x4431));
  }
  static __device__ __forceinline__ void widen(uint2 code, uint32_t, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i < 2 ? code.x : code.y;
      const uint32_t two = ptx::widen_e4m3(i % 2 == 0 ? word : word >> 16);
      v[2 * i] = __half2float(__ushort_as_half(static_cast<uint16_t>(two)));
      v[2 * i + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(two >> 16)));
    }
  }
};

template <>
struct KvForm<KvCode::kInt8> {
  static constexpr int kCapability = 80;
  static constexpr bool kBf16Operands = false;

  template <int kDim>
  static __device__ __forceinline__ __half fit(const HeadValues<kDim>& x, int) {
    constexpr int kEach = HeadValues<kDim>::kEach;
    uint32_t largest = 0;  // bits of magnitudes have their order, and NaNs on top
#pragma unroll
    for (int i = 0; i < 2 * kEach; ++i) {
      largest = max(largest, __float_as_uint(x.v[i / kEach][i % kEach]) & 0x7fffffffU);
    }
    const float top = __uint_as_float(__reduce_max_sync(~0U, largest));
    return __float2half_rn(top < INFINITY ? fminf(top / 127.0F, 65504.0F) : NAN);
  }
  template <int kEach>
  static __device__ __forceinline__ uint64_t codes(const float (&v)[kEach], float factor, float) {
    uint64_t bits = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float code = fminf(fmaxf(rintf(v[i] * factor), -127.0F), 127.0F);
      bits |= static_cast<uint64_t>(static_cast<uint32_t>(code + 128.0F)) << (8 * i);
    }
    return bits;
  }
  static __device__ __forceinline__ uint32_t key_pair(uint32_t word, int p) {
    return __byte_perm(word, 0, p == 0 ? 0x4140 : 0x4342);
  }
  static __device__ __forceinline__ uint32_t value_pair(uint32_t word, int p) {
    return __byte_perm(word, 0, p == 0 ? 0x4240 : 0x4341);
  }
  static __device__ __forceinline__ void widen(uint2 code, uint32_t parameters, float (&v)[8]) {
    const float scale = __half2float(__ushort_as_half(static_cast<uint16_t>(parameters)));
    const float offset = -(32768.0F + 128.0F) * scale;  // bytes 00 code 00 47: 32768 + code
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = __byte_perm(i < 4 ? code.x : code.y, 0x47000000U, 0x7404 | i % 4 << 4);
      v[i] = fmaf(__uint_as_float(bits), scale, offset);
    }
  }
};

/// Sums and largest numbers of four neighbouring lanes.
struct FourLanes {
  template <typename T>
  static __device__ __forceinline__ T sum(T value) {
    value += __shfl_xor_sync(~0U, value, 2);
    return value + __shfl_xor_sync(~0U, value, 1);
  }
  static __device__ __forceinline__ float largest(float value) {
    value = fmaxf(value, __shfl_xor_sync(~0U, value, 2));
    return fmaxf(value, __shfl_xor_sync(~0U, value, 1));
  }
};

// The line of numbers is that whose codes fit them best, of seven ranges, 1 to 0.7 of the whole:
// sums that depend on no other, where quant/kv_formats.h fits again and again. Codes are the
// nearest on the rounded line. Of numbers that are not all finite the offset is NaN.
constexpr int kLineRanges = 7;

/// Where a line's numbers lie. Range r is 1 - r / 20 of the whole, about its middle.
struct LineSpan {
  float mean;
  float middle;   // of the numbers less their mean
  float inverse;  // of the whole range's scale

  ///   high, low  the largest number, and the largest negated one
  __device__ __forceinline__ LineSpan(float the_mean, float high, float low) : mean(the_mean) {
    high -= mean;
    low = -low - mean;
    middle = 0.5F * (high + low);
    inverse = high > low ? 15.0F / (high - low) : 0.0F;
  }
};

/// The codes of numbers in a range of theirs.
struct RangeSums {
  uint32_t codes = 0;    // sum of codes, sum of squares above bit 16
  float product = 0.0F;  // with the numbers less their mean

  __device__ __forceinline__ void add(float value, float middle, float inverse) {
    constexpr float kRound = 12582912.0F;  // 3 * 2^22: codes are the last bits of sums with it
    const float place = fmaf(value - middle, inverse, 7.5F);
    const float rounded = fminf(fmaxf(place, 0.0F), 15.0F) + kRound;
    const uint32_t code = __float_as_uint(rounded) & 15U;
    codes += code + (code * code << 16);
    product = fmaf(rounded - kRound, value, product);
  }
};

/// What the codes of a range explain of a line's numbers: product^2 / variance.
struct RangeFit {
  float product = 0.0F;
  float variance = 1.0F;
  float sum = 0.0F;  // of codes

  ///   count  of the numbers
  __device__ __forceinline__ RangeFit(const RangeSums& sums, int count) {
    const auto all = static_cast<float>(sums.codes & 0xffffU);
    const float own = static_cast<float>(sums.codes >> 16) - all * all / static_cast<float>(count);
    if (own > 0.0F) {
      product = sums.product;
      variance = own;
      sum = all;
    }
  }
  __device__ __forceinline__ RangeFit(float p, float v, float s)
      : product(p), variance(v), sum(s) {}
  [[nodiscard]] __device__ __forceinline__ bool explains_less_than(const RangeFit& other) const {
    return other.product * other.product * variance > product * product * other.variance;
  }
  /// Scale and offset.
  [[nodiscard]] __device__ __forceinline__ __half2 line(float mean, int count) const {
    const __half scale = __float2half_rn(fminf(product / variance, 65504.0F));
    const float offset = mean - __half2float(scale) * (sum / static_cast<float>(count));
    const float finite = fminf(fmaxf(offset, -65504.0F), 65504.0F);
    return __halves2half2(scale, __float2half_rn(fabsf(mean) < INFINITY ? finite : NAN));
  }
};

/// How much smaller a range is than the whole, as a factor of its inverse.
[[nodiscard]] __device__ constexpr float range_factor(int range) {
  return 20.0F / static_cast<float>(20 - range);
}

/// The line of 4 kOwn numbers, of which four neighbouring lanes have kOwn each.
template <int kOwn>
__device__ __forceinline__ __half2 fit_line(const float (&x)[kOwn]) {
  constexpr int kCount = 4 * kOwn;
  float own = 0.0F;
  float high = -INFINITY;
  float low = -INFINITY;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    own += x[i];
    high = fmaxf(high, x[i]);
    low = fmaxf(low, -x[i]);
  }
  const LineSpan span(FourLanes::sum(own) / kCount, FourLanes::largest(high),
                      FourLanes::largest(low));
  RangeSums sums[kLineRanges];  // all first, so that their reductions overlap
#pragma unroll
  for (int range = 0; range < kLineRanges; ++range) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      sums[range].add(x[i] - span.mean, span.middle, span.inverse * range_factor(range));
    }
    sums[range].codes = FourLanes::sum(sums[range].codes);
    sums[range].product = FourLanes::sum(sums[range].product);
  }
  RangeFit best(sums[0], kCount);
#pragma unroll
  for (int range = 1; range < kLineRanges; ++range) {
    const RangeFit fit(sums[range], kCount);
    best = best.explains_less_than(fit) ? fit : best;
  }
  return best.line(span.mean, kCount);
}

/// The line of a head's numbers, over a warp: four lanes try each range, by little code, since a
/// kernel of few rows waits for its instructions.
template <int kDim>
__device__ __forceinline__ __half2 fit_int4(const HeadValues<kDim>& x, int lane) {
  using Values = HeadValues<kDim>;
  constexpr int kOwn = 2 * Values::kEach;
  constexpr int kTurns = Values::kLanes / 4;
  float numbers[kOwn];
  float own = 0.0F;
  float high = -INFINITY;
  float low = -INFINITY;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    numbers[i] = x.v[i / Values::kEach][i % Values::kEach];
    own += numbers[i];
    high = fmaxf(high, lane < Values::kLanes ? numbers[i] : -INFINITY);
    low = fmaxf(low, lane < Values::kLanes ? -numbers[i] : -INFINITY);
  }
  const LineSpan span(sum_warp(own) / kDim, max_warp(high), max_warp(low));
  const float inverse = span.inverse * range_factor(min(lane / 4, kLineRanges - 1));
  RangeSums sums;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float number = __shfl_sync(~0U, numbers[i], lane % 4 * kTurns + turn);
      sums.add(number - span.mean, span.middle, inverse);
    }
  }
  sums.codes = FourLanes::sum(sums.codes);
  sums.product = FourLanes::sum(sums.product);
  RangeFit best(sums, kDim);
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {  // of equal ones the first range
    const RangeFit other(__shfl_xor_sync(~0U, best.product, step),
                         __shfl_xor_sync(~0U, best.variance, step),
                         __shfl_xor_sync(~0U, best.sum, step));
    const bool takes =
        (lane & step) == 0 ? best.explains_less_than(other) : !other.explains_less_than(best);
    best = takes ? other : best;
  }
  return best.line(span.mean, kDim);
}

template <>
struct KvForm<KvCode::kInt4> {
  static constexpr int kCapability = 80;
  static constexpr bool kBf16Operands = false;

  template <int kDim>
  static __device__ __forceinline__ __half2 fit(const HeadValues<kDim>& x, int lane) {
    return fit_int4<kDim>(x, lane);
  }
  template <int kEach>
  static __device__ __forceinline__ uint64_t codes(const float (&v)[kEach],
                                                   float factor,
                                                   float offset) {
    uint64_t bits = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float code = fminf(fmaxf((v[i] - offset) * factor, 0.0F), 15.0F) + 12582912.0F;
      bits |= static_cast<uint64_t>(__float_as_uint(code) & 15U) << (4 * i);
    }
    return bits;
  }
  static __device__ __forceinline__ uint32_t key_pair(uint32_t word, int p) {
    return ((p & 2) == 0 ? word : word >> 8) & ((p & 1) == 0 ? 0x000f000fU : 0x00f000f0U);
  }
  static __device__ __forceinline__ uint32_t value_pair(uint32_t word, int p) {
    return key_pair(word, p);
  }
  static __device__ __forceinline__ void widen(uint2 code, uint32_t parameters, float (&v)[8]) {
    // 128 + code, exact in bf16, is widened by a shift.
    const float scale = __half2float(__ushort_as_half(static_cast<uint16_t>(parameters)));
    const float offset =
        __half2float(__ushort_as_half(static_cast<uint16_t>(parameters >> 16))) - 128.0F * scale;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = ((code.x >> (4 * i)) & 0x000f000fU) | 0x43004300U;
      v[i] = fmaf(__uint_as_float(two << 16), scale, offset);
      v[i + 4] = fmaf(__uint_as_float(two & 0xffff0000U), scale, offset);
    }
  }
};

using Int4Form = KvForm<KvCode::kInt4>;

/// Codes without parameters in the cache: of what the layer's steps have divided, plus 8.
template <>
struct KvForm<KvCode::kInt4Static> : Int4Form {
  template <int kEach>
  static __device__ __forceinline__ uint64_t codes(const float (&v)[kEach], float factor, float) {
    return Int4Form::codes(v, factor, -kStaticMiddle);
  }
  static __device__ __forceinline__ void widen(uint2 code, uint32_t, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = ((code.x >> (4 * i)) & 0x000f000fU) | 0x43004300U;  // 128 + code in bf16
      v[i] = __uint_as_float(two << 16) - (128.0F + kStaticMiddle);
      v[i + 4] = __uint_as_float(two & 0xffff0000U) - (128.0F + kStaticMiddle);
    }
  }
};

/// Values as those of int4; keys, which have lines of channels, are coded by groups.
template <>
struct KvForm<KvCode::kInt4Page> : Int4Form {
  /// A channel's pairs (p, e) of a word's eight, of K: `scale` and `offset` are its numbers.
  static __device__ __forceinline__ void widen_channels(uint32_t code,
                                                        const float (&scale)[8],
                                                        const float (&offset)[8],
                                                        float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t two = ((code >> (4 * i)) & 0x000f000fU) | 0x43004300U;  // 128 + code in bf16
      v[i] = fmaf(__uint_as_float(two << 16), scale[i], offset[i]);
      v[i + 4] = fmaf(__uint_as_float(two & 0xffff0000U), scale[i + 4], offset[i + 4]);
    }
  }
};

/// Codes that a KvForm describes.
template <KvCode kCode>
concept HasKvForm = requires {
  KvForm<kCode>::kCapability;
};

/// run.template operator()<code>(); `otherwise` where the code has no KvForm.
template <typename Result, typename Run>
Result with_kv_form(KvCode code, const Run& run, Result otherwise) {
  Result result = otherwise;
  const auto try_code = [&]<KvCode kCode>() {
    if constexpr (HasKvForm<kCode>) {
      if (code == kCode) {
        result = run.template operator()<kCode>();
      }
    }
  };
  [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    (try_code.template operator()<kKvCodes[kIndex]>(), ...);
  }
  (std::make_index_sequence<kKvCodes.size()>{});
  return result;
}

}  // namespace nibble::cuda
