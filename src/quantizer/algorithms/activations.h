#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "quant/scheme.h"

namespace nibble {

/// Rows that enter a product.
struct ActivationRows {
  float* x = nullptr;  // [rows, k]
  int64_t rows = 0;
  int64_t k = 0;
};

/// Rows as a product with these activations multiplies them: of INT8 per token what the codes mean.
/// Rows of other formats stay as they are.
void round_activations(ActFormat act, const ActivationRows& rows, ThreadPool& pool);

}  // namespace nibble
