#pragma once

// INT4 keys of the cache as INT8 codes, which queries are multiplied with; see attention_kernels.h.

#include "backend/cpu/kernels/common.h"

namespace nibble::cpu {
namespace {

/// What stands for the 16 codes of each of 16 INT4 keys: whole numbers of a unit, which is a 127th
/// of the largest. Such a key loses what an INT8 cache may lose of it.
struct KeyCodes {
  F32x16 unit;  // NaN for keys that are not finite
  F32x16 step;  // code c stands for c step + start units, rounded
  F32x16 start;

  KeyCodes(F32x16 scale, F32x16 offset) {
    const F32x16 last = Simd::fma(Simd::set(15.0F), scale, offset);
    F32x16 largest = Simd::max(magnitude(last), Simd::set(kLeastLargest));
    largest = Simd::max(magnitude(offset), largest);
    const F32x16 sum = Simd::add(offset, last);
    const F32x16 spoiled = Simd::sub(sum, sum);  // 0, NaN if they are not finite
    const auto if_finite = [&](F32x16 x) {
      return Simd::select_less(Simd::set(-1.0F), spoiled, x, Simd::set(0.0F));
    };
    const F32x16 inverse = Simd::div(Simd::set(127.0F), largest);
    unit = Simd::fma(largest, Simd::set(1.0F / 127.0F), spoiled);
    step = if_finite(Simd::mul(scale, inverse));
    start = if_finite(Simd::mul(offset, inverse));
  }

  /// The INT8 codes of 16 codes of one key.
  static I32x16 table(float step, float start) {
    constexpr float kCodes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return Simd::to_int(Simd::fma(Simd::load(kCodes), Simd::set(step), Simd::set(start)));
  }

 private:
  static constexpr float kLeastLargest = 0x1p-100F;
};

}  // namespace
}  // namespace nibble::cpu
