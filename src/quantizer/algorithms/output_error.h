#pragma once

#include "base/thread_pool.h"
#include "quantizer/algorithms/gram.h"

namespace nibble {

/// trace(E H E^T) of E = w - values, both [n, k]; values null: of w itself. Products in single
/// precision, sums in double; does not depend on the number of threads.
[[nodiscard]] double output_error(
    const Gram& gram, const float* w, const float* values, int64_t n, ThreadPool& pool);

}  // namespace nibble
