#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/linear_reader.h"

namespace nibble {

/// Weights of a model that no file has.
class WeightMaker {
 public:
  virtual ~WeightMaker() = default;
  /// Of a linear layer [n, k], or a table of rows, in memory of their own.
  virtual Result<MappedLinear> linear(const std::string& module, int64_t n, int64_t k) = 0;
  /// Of any other tensor.
  virtual Result<std::vector<float>> numbers(const std::string& tensor,
                                             const std::vector<int64_t>& shape) = 0;
};

}  // namespace nibble
