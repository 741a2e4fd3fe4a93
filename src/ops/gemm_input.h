#pragma once

#include <cstdint>

namespace nibble {

/// What is done to each row of x before it is rounded and multiplied; in F32.
///   kPlain      nothing
///   kRmsNorm    x / sqrt(mean(x²) + eps) * norm_weight[k]
///   kLayerNorm  c / sqrt(mean(c²) + eps) * norm_weight[k] + norm_bias[k], where c = x - mean(x)
///   kSiluMul    rows hold gate [k], then up [k]: silu(gate) * up
///   kRelu       max(x, 0); NaN stays NaN
/// A device has these in one file for norms and one for activations, or in one for both:
/// backend/cpu/kernels/row_kernels.h, backend/cuda/kernels/rows/{norm,activation}.cu.
struct GemmInput {
  enum class Kind : uint8_t { kPlain, kRmsNorm, kLayerNorm, kSiluMul, kRelu };
  Kind kind = Kind::kPlain;
  const float* norm_weight = nullptr;
  float eps = 0.0F;
  const float* norm_bias = nullptr;
};

/// Whether rows are the residual stream's, in F32, rather than results of another product.
[[nodiscard]] constexpr bool is_norm(GemmInput::Kind kind) {
  return kind == GemmInput::Kind::kRmsNorm || kind == GemmInput::Kind::kLayerNorm;
}

/// Numbers in a row of x of a product that multiplies k.
[[nodiscard]] constexpr int64_t input_width(GemmInput::Kind kind, int64_t k) {
  return kind == GemmInput::Kind::kSiluMul ? 2 * k : k;
}

}  // namespace nibble
