#pragma once

#include <cstdint>
#include <span>

#include "quant/quant_tensor.h"

namespace nibble {

/// The token table [vocab, hidden], in F32, F16 or BF16 as the file stores it.
class Embedding final {
 public:
  /// `table` must not be quantized.
  explicit Embedding(QuantTensor table);

  [[nodiscard]] int64_t vocab_size() const { return table_.n; }
  [[nodiscard]] int64_t hidden_size() const { return table_.k; }

  /// out[r] = table[tokens[r]] as f32, out [tokens, hidden]. Ids must be in 0..vocab_size-1.
  void gather(std::span<const int32_t> tokens, float* out) const;

 private:
  QuantTensor table_;
};

}  // namespace nibble
