#pragma once

#include <cstdint>

#include "core/gemm_input.h"
#include "ops/activations.h"
#include "quant/act_spec.h"
#include "quant/quant_tensor.h"

namespace nibble {

enum class GemmOutput : uint8_t { kStore, kAdd };

/// y (+)= input(x) · dequant(w)ᵀ (+ bias) for m rows.
///   x [m, k] ([m, input_width(kind, k)]), rows x_stride elements apart
///   y [m, n], rows y_stride elements apart; F32 for kAdd
///   bias [n] f32, or null; like those of the norm it lies in the backend's memory
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
