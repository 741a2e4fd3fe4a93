#pragma once

#include <cstdint>

namespace nibble {

/// Whether CPU and GPU are to give the same results of attention: all but the order of sums is then
/// common, and F32 hardly ever shows that. kShared is for BF16 caches:
/// - Elements of rotated queries and keys are multiples of 2^-kQueryPlaces and 2^-kKeyPlaces of the
///   power of two in their row's largest, before they are rounded to BF16: sums of their products
///   are exact as long as they stay below 2^(24 - kQueryPlaces - kKeyPlaces) of the two powers.
/// - Weights are those of WeightForm, relative to a whole power of two: rounding them to BF16 does
///   not depend on how the cache is cut. Their sum is that of the rounded ones, which F32 holds
///   exactly but for very small ones.
enum class AttentionForm : uint8_t { kOwn, kShared };

constexpr int kQueryPlaces = 9;
constexpr int kKeyPlaces = 10;

/// What a number is added to and what is then taken away again, to round it to multiples of
/// 2^-places of `power`, times that: the sum's last place is the multiple.
constexpr float rounding_shift(int places) { return 1.5F * static_cast<float>(1 << (23 - places)); }

constexpr float kLeastLog2 = -96.0F;  // smaller weights count as 2^-96

/// A row's exponents are kept as kBase + x, rounded to multiples of 2^-15, and shifted left by
/// eight bits: x's fraction f is then a mantissa, m = 1 + f, and its integer part adds to an
/// exponent. The weight's bits are these plus those of a polynomial in m, by fused multiply-adds:
/// 2^32 (1 + (2^f - 1 - f) / 2). Exact for integers; relative error 8.6e-5.
struct WeightForm {
  static constexpr float kBase = 480.0F;
  static constexpr float kLeast = kBase + kLeastLog2;
  static constexpr float kUnit = 0x1p32F;  // 2^(512 - kBase): integers count modulo 512
  static constexpr float kCubic = kUnit * 0.0385335609F;
  static constexpr float kQuadratic = kUnit * -0.00177822495F;
  static constexpr float kLinear = kUnit * -0.264485836F;
  static constexpr float kConstant = kUnit * 1.22773051F;
};

/// 2^x: x = n + f, |f| <= 1/2, where n is what adding and taking away kShift leaves; 2^f by a
/// polynomial of degree 4 in f with f(0) = 1, of least relative error, 2.9e-6 (fitted), whose bits
/// n is added to: exact for integers. The weight of a sink of logit s is 2^f 2^(n - top) with n + f
/// = s kLog2E, within kLargest: as 2^f does not depend on the row's top, which may be any whole
/// number not too far below its largest score, weights of different tops differ by a power of two
/// alone. The sum of a row's weights takes it as it is, so that a row's values need no rescaling.
struct SinkForm {
  static constexpr float kLog2E = 1.44269504F;
  static constexpr float kShift = 12582912.0F;  // 1.5 * 2^23: integers are the low bits of the sum
  static constexpr float kLargest = 0x1p20F;    // of the logit's exponent: n is exact
  static constexpr float kMost = 100.0F;        // of n - top: the sum stays finite
  static constexpr float kQuartic = 0.00958285576F;
  static constexpr float kCubic = 0.0559064402F;
  static constexpr float kQuadratic = 0.240240987F;
  static constexpr float kLinear = 0.693124192F;
};

}  // namespace nibble
