#pragma once

#include <cstring>
#include <limits>
#include <vector>

#include "backend/backend.h"

namespace nibble {

/// What a product makes of its dense input before it multiplies, [rows, n]: its result with the
/// identity in F32.
inline std::vector<float> input_of(
    Backend& backend, const float* x, int64_t rows, int64_t n, const GemmInput& input) {
  auto identity = QuantTensor::allocate({WeightCode::kF32, ScalePer::kNone}, n, n).value();
  std::memset(identity.codes.data(), 0, identity.codes.size());
  for (int64_t i = 0; i < n; ++i) {
    identity.codes.as<float>()[static_cast<size_t>(i * n + i)] = 1.0F;
  }
  const auto gemm = backend.prepare_gemm(identity, ActFormat::kFloat, rows).value();
  std::vector<float> y(static_cast<size_t>(rows * n), std::numeric_limits<float>::quiet_NaN());
  gemm->run({.x = x,
             .x_stride = input_width(input.kind, n),
             .m = rows,
             .y = y.data(),
             .y_stride = n,
             .input = input});
  return y;
}

}  // namespace nibble
