#pragma once

#include <cstdint>

#include "core/gemm_input.h"
#include "ops/activations.h"

namespace nibble {

/// out[r] = norm(x[r]), rounded to the type of `out`, for every row of a step: once for all that
/// read it, where several layers of different kinds do.
///   x [rows, width] f32, out [rows, width]
struct NormalizeArgs {
  const float* x = nullptr;
  int64_t width = 0;
  GemmInput norm;  // kRmsNorm or kLayerNorm
  Activations out;
};

/// The rows that a product reads, before they are rounded: input(x[r]).
///   x [rows, input_width(input.kind, width)], rows `stride` elements apart
struct InputRows {
  ConstActivations x;
  int64_t stride = 0;
  int64_t width = 0;  // of the product's k
  GemmInput input;
};

/// y[r] += rows[r] / (1 + e^-(x[r] · gate)) for every row of a step: an expert that every token
/// takes, as much of it as a gate says. Sums in F32.
///   x, rows [rows, width], y [rows, width] f32, gate [width] f32 in the backend's memory
struct GatedAddArgs {
  ConstActivations x;
  const float* gate = nullptr;
  ConstActivations rows;
  int64_t width = 0;
  float* y = nullptr;
};

}  // namespace nibble
