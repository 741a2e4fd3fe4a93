#pragma once

#include <cstdint>
#include <vector>

#include "backend/testing/bf16_rows.h"
#include "backend/testing/random_gemm.h"

namespace nibble {

/// Gaussian numbers that BF16 holds.
inline std::vector<float> random_bf16_floats(int64_t count, uint32_t seed) {
  return to_f32(to_bf16(random_floats(count, seed)));
}

}  // namespace nibble
