#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "quant/quant_view.h"

namespace nibble {

/// The token table [vocab, hidden], in F32, F16 or BF16, where it lies in the file: of a large
/// table only the rows of tokens that occur are ever resident.
class Embedding final {
 public:
  /// `table` must not be quantized; `owner` keeps its memory.
  Embedding(QuantView table, std::shared_ptr<const void> owner);

  [[nodiscard]] int64_t vocab_size() const { return table_.n; }
  [[nodiscard]] int64_t hidden_size() const { return table_.k; }

  /// out[r] = table[tokens[r]] as f32, out [tokens, hidden]. Ids must be in 0..vocab_size-1.
  void gather(std::span<const int32_t> tokens, float* out) const;

 private:
  QuantView table_;
  std::shared_ptr<const void> owner_;
};

}  // namespace nibble
