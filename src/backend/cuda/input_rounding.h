#pragma once

#include <cstdint>

#include "backend/cuda/launch.h"
#include "backend/cuda/row_kernels.h"
#include "base/status.h"
#include "ops/activations.h"

namespace nibble::cuda {

/// The rows that a product reads: input(x[r]), rounded to the form of `out`.
///   x [rows, input_width(input.kind, k)], rows `stride` elements apart: f32 in front of a norm,
///   which takes dense rows, else bf16
struct InputRounding {
  ConstActivations x;
  GemmInput input;
  int64_t stride = 0;
  int64_t rows = 0;
  int64_t k = 0;
  QuantizedRows out;

  /// Whether the product can read x as it is: dense rows of numbers.
  [[nodiscard]] bool nothing_to_do() const {
    return input.kind == GemmInput::Kind::kPlain && row_scales(out.format, k) == 0 && stride == k;
  }
};

/// Launches what makes the rows, unless there is nothing to do. The errors of the kernels.
Status round_input(const InputRounding& args, const LaunchContext& launch);

}  // namespace nibble::cuda
