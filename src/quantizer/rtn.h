#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "quant/quant_tensor.h"

namespace nibble {

/// How the scale of a group of weights is chosen; codes are then the nearest ones for the scale as
/// it is stored.
enum class ScaleRule : uint8_t {
  kBest,        // what the scheme is best served by; see docs/quantization.md
  kAbsMax,      // absmax over the largest code: 7, 127 or 448; fp4: the "even" exponent
  kAbsMaxHalf,  // absmax / 7.5 (127.5): half a step is clipped at the positive end
  kSigned,      // the full range -8..7, turned towards the element of largest magnitude
  kLsq,        // integers: 19 candidates of absmax / (6.15 .. 8.85), each refitted by least squares
  kLsqSigned,  // kLsq with either sign of the scale
  kMse,        // the range shrunk from 1 down to 0.28 in steps of 0.01, refitted by least squares
  kMinMax,     // zero points: from the smallest to the largest weight
  kQuark,      // two stages of scales: AMD Quark's arithmetic
};

/// Accepts best, absmax, absmax7, absmax7.5, signed, lsq, lsq_signed, mse, minmax and quark.
Result<ScaleRule> parse_scale_rule(std::string_view name);
[[nodiscard]] std::string_view scale_rule_name(ScaleRule rule);
/// Every rule once.
[[nodiscard]] std::span<const ScaleRule> all_scale_rules();

/// Squared sums that tell how well a tensor survived.
struct QuantError {
  double signal = 0;  // sum of w^2
  double noise = 0;   // sum of (w - decoded)^2

  /// 10 log10(signal / noise); capped at 200 for an exact result.
  [[nodiscard]] double snr_db() const;
};

}  // namespace nibble
