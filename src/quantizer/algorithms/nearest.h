#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "checkpoint/dialect.h"
#include "checkpoint/source_matrix.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"

namespace nibble {

/// A matrix in memory.
struct PlainMatrix {
  int64_t n = 0;
  int64_t k = 0;
  std::vector<float> w;  // [n, k]
};

/// kCorrupt for a weight that is NaN or infinite, naming tensor and place; the errors of decode().
///   reader  of the matrix: lets the pages go that were read; null: they stay
Result<PlainMatrix> read_matrix(const SourceMatrix& source,
                                const CheckpointReader* reader = nullptr);

/// The nearest codes with their scales, as the scheme's encoder stores them in the dialect and a
/// loader reads them again. A scale that fused matrices share is that of this one alone.
/// Errors: those of make_encoder(); kUnsupported for a format without codes.
Result<QuantTensor> nearest_codes(const PlainMatrix& matrix,
                                  const QuantScheme& scheme,
                                  Dialect dialect,
                                  ThreadPool& pool);

/// Values of all rows: out [n, k].
void decode_rows(const QuantTensor& tensor, float* out, ThreadPool& pool);

}  // namespace nibble
