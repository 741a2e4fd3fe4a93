#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "checkpoint/dialect.h"
#include "checkpoint/source_matrix.h"
#include "quant/scheme.h"

namespace nibble {

/// A matrix whose rounding is to be judged.
struct JudgedMatrix {
  const SourceMatrix* matrix = nullptr;
  std::vector<const QuantScheme*> schemes;  // that it would be stored in; null: left out
};

/// How matrices are read and rounded.
struct Judging {
  const CheckpointReader* reader = nullptr;  // of the matrices, whose pages it lets go; null: none
  Dialect dialect = Dialect::kCompressedTensors;
  ThreadPool& pool;
};

struct OutputErrorOptions {
  std::string model;                                 // folder
  const std::vector<std::vector<int32_t>>& windows;  // of equal lengths
  Judging how;
  int64_t memory = int64_t{1} << 30;  // for the sums of experts; a pass is made for each fill of it
  std::function<void(int64_t layers)> progress = [](auto) {};
};

/// Errors by scheme; empty for schemes that were left out.
using SchemeErrors = std::vector<std::optional<double>>;

/// What the nearest codes do to the outputs of matrices when the model, not rounded anywhere, reads
/// a text: |Q(X) V^T - X W^T|^2 / |X W^T|^2 for weights W, their rounded values V and rows X that
/// the product rounds to Q(X); the errors of rows and weights count as independent of each other.
/// Of a routed expert the rows are those that its router sends to it, as judge_experts() says, and
/// |X W^T|^2 is the mean over the same matrix of all experts of its layer.
/// Layer by layer: one layer and its sums of products are in memory, hidden states in an unnamed
/// file. Matrices whose outputs are infinite or none are left out of the result.
///   result: by module
/// Errors: those of LayerRunner::open(), kIo.
Result<std::map<std::string, SchemeErrors>> output_errors(const std::vector<JudgedMatrix>& matrices,
                                                          const OutputErrorOptions& options);

/// The same without a text, by the weights alone: |V - W|^2 / |W|^2.
Result<SchemeErrors> weight_errors(const JudgedMatrix& matrix, const Judging& how);

}  // namespace nibble
