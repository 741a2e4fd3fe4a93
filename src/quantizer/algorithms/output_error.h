#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "quantizer/algorithms/gram.h"

namespace nibble {

/// Weights, and what became of them: both [n, k]; values null: zeros.
struct ChangedWeights {
  const float* w = nullptr;
  const float* values = nullptr;
  int64_t n = 0;
};

/// trace(E H E^T) of E = w - values. Products in single precision, sums in double; does not depend
/// on the number of threads.
[[nodiscard]] double output_error(const Gram& gram,
                                  const ChangedWeights& weights,
                                  ThreadPool& pool);

}  // namespace nibble
