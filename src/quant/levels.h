#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "quant/code_traits.h"
#include "quant/quant_view.h"

namespace nibble {

/// INT4 in groups for INT8 activations, as QServe has it (https://arxiv.org/abs/2405.04532): the
/// scales of a row are integers, its steps, times one scale of the row. A weight is then an INT8,
/// (code - zero point) * step, times the row's scale, and a product is one exact integer sum. Every
/// code, whether it occurs or not, must give an INT8 of -127 to 127.

/// Whether weights enter products with these activations in two levels.
[[nodiscard]] constexpr bool in_two_levels(const WeightFormat& weight, ActFormat act) {
  return act == ActFormat::kInt8Token && weight.code == WeightCode::kInt4 &&
         weight.scale_per == ScalePer::kGroup && weight.zero_points == ZeroPoints::kPerScale;
}

inline constexpr int kMostLevel = 127;
inline constexpr int kLowestCode = code_traits(WeightCode::kInt4).low;
inline constexpr int kHighestCode = code_traits(WeightCode::kInt4).high;

/// Largest step of a group with this zero point, which is a code: 8 to 15.
[[nodiscard]] constexpr int most_step(int zero) {
  const int above = kHighestCode - zero;
  const int below = zero - kLowestCode;
  return kMostLevel / (above > below ? above : below);
}

/// The largest number of which both are multiples; either may be 0. remainder(a, b): fmod(), exact.
template <typename Remainder>
[[nodiscard]] constexpr float common_measure(float a, float b, const Remainder& remainder) {
  while (b > 0) {
    const float rest = remainder(a, b);
    a = b;
    b = rest;
  }
  return a;
}

/// One row in two levels.
struct RowLevels {
  float channel = 0;           // scale of the row: the largest one possible; 0: there is none
  std::vector<uint8_t> steps;  // [groups], from 1 on
};

/// Those of a row of int4 weights in groups with zero points.
[[nodiscard]] RowLevels levels_of(const QuantView& weight, int64_t row);

/// kUnsupported, naming the weights, the row and what can be done, where one of their rows has
/// none.
[[nodiscard]] Status check_levels(const QuantView& weight);

}  // namespace nibble
