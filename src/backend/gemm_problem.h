#pragma once

#include <cstdint>
#include <memory>

#include "quant/block_precision.h"
#include "quant/scheme.h"

namespace nibble {

/// What the rows of weights are.
enum class WeightRows : uint8_t {
  kPlain,
  kGateUp,  // of experts: those of a gate, then as many of up
};

/// A matrix product as far as the choice of its kernel depends on it:
/// y [m, n] (+)= x [m, k] · dequant(w [n, k])ᵀ (+ bias).
struct GemmProblem {
  WeightFormat weight;
  ActFormat act = ActFormat::kBf16;  // what rows of x are rounded to
  int64_t n = 0;
  int64_t k = 0;
  WeightRows rows = WeightRows::kPlain;
  int64_t experts = 0;  // matrices of a layer whose experts these are; 0: a dense product
  /// Of rows in blocks, for kernels that pack weights by their bits; a choice needs none.
  std::shared_ptr<const BlockPrecision> blocks;
};

}  // namespace nibble
