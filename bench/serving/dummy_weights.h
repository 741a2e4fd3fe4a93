#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "arch/config.h"
#include "base/thread_pool.h"
#include "model/weight_maker.h"
#include "quant/quant_tensor.h"
#include "quant/scheme.h"

namespace nibble {

/// Random weights of a model, to measure speed with: linear layers as `nibble quantize` stores
/// Gaussian ones of deviation 0.02 in a scheme; embeddings, head and routers in the model's own
/// type. A matrix repeats its first 256 rows, so that the largest model is ready as fast as memory
/// is copied. Norms are 1, biases 0. One thread at a time.
class DummyWeights final : public WeightMaker {
 public:
  DummyWeights(const ModelConfig& config, const QuantScheme& scheme, uint64_t seed);

  Result<MappedLinear> linear(const std::string& module, int64_t n, int64_t k) override;
  Result<std::vector<float>> numbers(const std::string& tensor,
                                     const std::vector<int64_t>& shape) override;

 private:
  enum class Kind : bool { kPlain, kCoded };
  /// The rows that matrices of k columns repeat.
  Result<const QuantTensor*> rows_of(int64_t k, Kind kind);
  Result<QuantTensor> repeated(const QuantTensor& rows, int64_t n);

  QuantScheme scheme_;
  WeightFormat plain_;            // of the model's type
  std::set<std::string> plains_;  // modules that are not quantized
  std::mt19937_64 random_;
  ThreadPool pool_;
  std::map<std::pair<int64_t, Kind>, QuantTensor> rows_;
};

}  // namespace nibble
