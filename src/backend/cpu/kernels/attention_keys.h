#pragma once

// INT4 keys of the cache as INT8 codes, which queries are multiplied with; see attention_kernels.h.

#include "backend/cpu/kernels/common.h"

namespace nibble::cpu {
namespace {

/// What stands for the 16 codes of each of 16 INT4 keys: whole numbers of a unit, which is a 127th
/// of the largest. Such a key loses what an INT8 cache may lose of it. Code c stands for
/// (c step + start) >> 8 units, in 16-bit integers modulo 2^16: within 0.54 of the exact number.
struct KeyCodes {
  F32x16 unit;   // NaN for keys that are not finite
  I32x16 step;   // twice, in both halves of a lane
  I32x16 start;  // likewise

  KeyCodes(F32x16 scale, F32x16 offset) {
    const F32x16 last = Simd::fma(Simd::set(15.0F), scale, offset);
    F32x16 largest = Simd::max(magnitude(last), Simd::set(kLeastLargest));
    largest = Simd::max(magnitude(offset), largest);
    const F32x16 sum = Simd::add(offset, last);
    const F32x16 spoiled = Simd::sub(sum, sum);  // 0, NaN if they are not finite
    const F32x16 inverse = Simd::div(Simd::set(127.0F * 256.0F), largest);
    unit = Simd::fma(largest, Simd::set(1.0F / 127.0F), spoiled);
    const auto twice = [&](F32x16 x) {
      const F32x16 finite = Simd::select_less(Simd::set(-1.0F), spoiled, x, Simd::set(0.0F));
      const I32x16 low = Simd::and_int(Simd::to_int(finite), Simd::set_int(0xffff));
      return Simd::or_int(low, Simd::shift_left<16>(low));
    };
    step = twice(Simd::mul(scale, inverse));
    start = twice(Simd::fma(offset, inverse, Simd::set(128.0F)));
  }

 private:
  static constexpr float kLeastLargest = 0x1p-100F;
};

}  // namespace
}  // namespace nibble::cpu
