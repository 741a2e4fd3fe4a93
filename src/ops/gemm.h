#pragma once

#include <cstdint>

#include "ops/activations.h"
#include "quant/act_spec.h"
#include "quant/quant_tensor.h"

namespace nibble {

enum class GemmOutput : uint8_t { kStore, kAdd };

/// What is done to each row of x before it is rounded and multiplied.
///   kPlain    nothing
///   kRmsNorm  x / sqrt(mean(x²) + eps) * norm_weight[k]
///   kSiluMul  rows hold gate [k], then up [k]: silu(gate) * up
struct GemmInput {
  enum class Kind : uint8_t { kPlain, kRmsNorm, kSiluMul };
  Kind kind = Kind::kPlain;
  const float* norm_weight = nullptr;
  float eps = 0.0F;
};

/// y (+)= input(x) · dequant(w)ᵀ (+ bias) for m rows.
///   x [m, k] ([m, 2 k] for kSiluMul), rows x_stride elements apart
///   y [m, n], rows y_stride elements apart; F32 for kAdd
///   bias [n] f32, or null; like norm_weight it lies in the backend's memory
/// A row of y depends only on its row of x, never on m: results do not change with batching.
struct GemmArgs {
  ConstActivations x;
  int64_t x_stride = 0;
  int64_t m = 0;
  Activations y;
  int64_t y_stride = 0;
  GemmOutput output = GemmOutput::kStore;
  GemmInput input = {};
  const float* bias = nullptr;
};

/// Plain product in double precision over dequantized weights, with activations rounded as `act`
/// says. The oracle of every GEMM kernel.
void reference_gemm(const QuantTensor& weight, const ActSpec& act, const GemmArgs& args);

}  // namespace nibble
