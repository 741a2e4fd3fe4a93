#pragma once

// Exponents of attention's weights in fixed point; the weights over INT8 and INT4 caches, of sinks.

#include "backend/cpu/kernels/common.h"
#include "ops/attention_form.h"

namespace nibble::cpu {
namespace {

/// 2^x for x <= 100, 2^-96 below -96, so that no weight or product with one is subnormal: SinkForm.
/// Exact for integers.
inline F32x16 exp2_weight(F32x16 x) {
  const F32x16 shift = Simd::set(SinkForm::kShift);
  const F32x16 clamped = Simd::max(Simd::set(kLeastLog2), x);  // NaN stays
  const F32x16 n = Simd::add(clamped, shift);
  const F32x16 f = Simd::sub(clamped, Simd::sub(n, shift));
  F32x16 p = Simd::fma(Simd::set(SinkForm::kQuartic), f, Simd::set(SinkForm::kCubic));
  p = Simd::fma(p, f, Simd::set(SinkForm::kQuadratic));
  p = Simd::fma(p, f, Simd::set(SinkForm::kLinear));
  p = Simd::fma(p, f, Simd::set(1.0F));
  return Simd::from_bits(Simd::add_int(Simd::bits(p), Simd::shift_left<23>(Simd::bits(n))));
}

inline float exp2_weight(float x) {
  float lanes[16];
  Simd::store(lanes, exp2_weight(Simd::set(x)));
  return lanes[0];
}

/// What a sink adds to the weights of a row whose top is 2^top: SinkForm.
inline float sink_weight(float sink, float top) {
  const float exponent = sink * SinkForm::kLog2E;
  const float least = exponent > -SinkForm::kLargest ? exponent : -SinkForm::kLargest;
  const float x = least < SinkForm::kLargest ? least : SinkForm::kLargest;
  const float n = (x + SinkForm::kShift) - SinkForm::kShift;
  const float above = n - top;
  return exp2_weight(x - n) * exp2_weight(above < SinkForm::kMost ? above : SinkForm::kMost);
}

/// A row's exponents are kept as kBase + x, so that their low bits are x in fixed point: rounded to
/// multiples of 2^-15 for BF16 caches, and for the others to those of 2^-7, as 7 bits are what is
/// left of a weight. The 128 octaves from kLeast on share all bits above.
template <int kCode>
struct ExponentRange {
  static constexpr float kBase = kCode == 1 ? WeightForm::kBase : 98400.0F;
  static constexpr float kLeast = kBase + kLeastLog2;
  static constexpr float kUnit = kCode == 1 ? 0x1p-15F : 0x1p-7F;
  static constexpr float kTop = kBase + 32.0F - kUnit;  // above: the row's top rises
};

/// INT8 and INT4 caches: a weight times its value's scale is 2^(x + l) with l = log2(scale), both
/// in multiples of 2^-7, and a BF16 number's bits are those of n + f, n whole, but for the
/// difference of f and 2^f - 1: 128 times that, rounded, is in integers what is taken away here.
/// Exact for f = 0; relative error 0.0066 at most and 0.0023 in the mean of squares, of which
/// rounding to BF16 alone is 0.0039 and 0.0017.
struct CodeWeightForm {
  static constexpr int kPlaces = 7;
  static constexpr int kFractions = 1 << kPlaces;
  static constexpr int kCubic = 640;
  static constexpr int kShift = 18;
  /// Added to an exponent's low bits: for x = -96 these are 0. The power of two that all weights
  /// have too much goes with their sum; x + l has room for 206 octaves, of which no product is
  /// subnormal and no sum infinite.
  static constexpr int kBias = 76 << kPlaces;
  static constexpr float kTooMuch = 0x1p45F;      // that power: 2^(96 + 76 - 127)
  static constexpr float kLeastScale = 0x1p-52F;  // smaller ones count as this
  static constexpr float kScaleLimit = 0x1p26F;   // others are as if they were not finite

  static constexpr int excess(int f) {
    return (f * (kFractions - f) * (kCubic + f) + (1 << (kShift - 1))) >> kShift;
  }
};

/// The weights of 16 keys times their scales: BF16 numbers. `log`: see code_scale.
inline F32x16 code_weight(F32x16 exponent, I32x16 log) {
  using Form = CodeWeightForm;
  const I32x16 x = Simd::add_int(Simd::bits(exponent), log);
  const I32x16 f = Simd::and_int(x, Simd::set_int(Form::kFractions - 1));
  const I32x16 rest = Simd::sub_int(Simd::set_int(Form::kFractions), f);
  const I32x16 square = Simd::dot_s16(Simd::set_int(0), f, rest);
  const I32x16 cubic = Simd::add_int(f, Simd::set_int(Form::kCubic));
  const I32x16 half = Simd::set_int(1 << (Form::kShift - 1));
  const I32x16 excess = Simd::shift_right<Form::kShift>(Simd::dot_s16(half, square, cubic));
  return Simd::from_bits(Simd::shift_left<16>(Simd::sub_int(x, excess)));
}

/// log2 of scales from kLeastScale to kScaleLimit, in multiples of 2^-7, plus CodeWeightForm's
/// bias. The polynomial of least error, 0.0007 (fitted), on a mantissa of 1 to 2.
inline I32x16 code_scale(F32x16 scale) {
  const I32x16 bits = Simd::bits(scale);
  const F32x16 m = Simd::and_or(bits, Simd::from_bits(Simd::set_int(0x7fffff)), Simd::set(1.0F));
  const F32x16 n = Simd::to_float(Simd::shift_right<23>(bits));
  F32x16 p = Simd::fma(Simd::set(0.15824871F), m, Simd::set(-1.051875F));
  p = Simd::fma(p, m, Simd::set(3.04788423F));
  p = Simd::fma(p, m, Simd::set(-2.15362072F - 127.0F));
  const F32x16 log = Simd::mul(Simd::add(n, p), Simd::set(CodeWeightForm::kFractions));
  return Simd::add_int(Simd::to_int(log), Simd::set_int(CodeWeightForm::kBias));
}

}  // namespace
}  // namespace nibble::cpu
