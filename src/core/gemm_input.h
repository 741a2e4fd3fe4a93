#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace nibble {

/// What is done to each row of x before it is rounded and multiplied; in F32.
///   kPlain      nothing
///   kRmsNorm    x / sqrt(mean(x²) + eps) * norm_weight[k]
///   kLayerNorm  c / sqrt(mean(c²) + eps) * norm_weight[k] + norm_bias[k], where c = x - mean(x)
///   kSiluMul    rows hold gate [k], then up [k]: silu(gate) * up
///   kRelu       max(x, 0); NaN stays NaN
///   kGeluTanh   x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³)))
///   kClampedSwiglu  rows as kSiluMul's: g / (1 + e^(-kSwigluAlpha g)) * (u + 1), where g is the
///   gate,
///               at most `limit`, and u is up, between -limit and limit (gpt-oss)
/// With `turn`, a power of two from 2 on that divides k, each `turn` neighbours of what an
/// activation gives are then multiplied by the Hadamard matrix of that order (quant/hadamard.h).
/// A device has these in one file for norms and one for activations, or in one for both:
/// backend/cpu/kernels/row_kernels.h, backend/cuda/kernels/rows/{norm,activation}.cu.
struct GemmInput {
  enum class Kind : uint8_t {
    kPlain,
    kRmsNorm,
    kLayerNorm,
    kSiluMul,
    kRelu,
    kGeluTanh,
    kClampedSwiglu,
  };
  Kind kind = Kind::kPlain;
  const float* norm_weight = nullptr;
  float eps = 0.0F;
  const float* norm_bias = nullptr;
  float limit = 0.0F;
  int64_t turn = 0;
};

/// Whether rows are the residual stream's, in F32, rather than results of another product.
[[nodiscard]] constexpr bool is_norm(GemmInput::Kind kind) {
  return kind == GemmInput::Kind::kRmsNorm || kind == GemmInput::Kind::kLayerNorm;
}

/// Those between the products of an MLP.
inline constexpr GemmInput::Kind kActivations[] = {
    GemmInput::Kind::kSiluMul, GemmInput::Kind::kRelu, GemmInput::Kind::kGeluTanh,
    GemmInput::Kind::kClampedSwiglu};

// GELU as x / (1 + e^-(kGeluLinear * x + kGeluCubic * x³)); below kLeastGelu it stays what it is
// there, -1e-37.
inline constexpr float kGeluLinear = 1.59576912F;  // 2 sqrt(2 / pi)
inline constexpr float kGeluCubic = 0.0713548163F;
inline constexpr float kLeastGelu = -10.0F;
inline constexpr float kSwigluAlpha = 1.702F;

/// What an activation makes of an element, and of that of `up` where rows have one: the oracle of
/// tests.
[[nodiscard]] inline double exact_activation(GemmInput::Kind kind,
                                             double x,
                                             double up,
                                             double limit = 0.0) {
  constexpr double kRoot = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
  switch (kind) {
    case GemmInput::Kind::kSiluMul:
      return x / (1.0 + std::exp(-x)) * up;
    case GemmInput::Kind::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(kRoot * (x + 0.044715 * x * x * x)));
    case GemmInput::Kind::kClampedSwiglu: {
      const double gate = x > limit ? limit : x;  // NaN stays, as in torch's clamp
      const double value = up > limit ? limit : up < -limit ? -limit : up;
      return gate / (1.0 + std::exp(-kSwigluAlpha * gate)) * (value + 1.0);
    }
    default:
      return std::isnan(x) ? x : std::max(x, 0.0);
  }
}

/// Whether rows hold a gate, too.
[[nodiscard]] constexpr bool has_gate(GemmInput::Kind kind) {
  return kind == GemmInput::Kind::kSiluMul || kind == GemmInput::Kind::kClampedSwiglu;
}

/// Numbers in a row of x of a product that multiplies k.
[[nodiscard]] constexpr int64_t input_width(GemmInput::Kind kind, int64_t k) {
  return has_gate(kind) ? 2 * k : k;
}

}  // namespace nibble
