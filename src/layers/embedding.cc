#include "layers/embedding.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/f16.h"

namespace nibble {

Embedding::Embedding(QuantTensor table) : table_(std::move(table)) {
  CHECK(!table_.format.quantized());
}

void Embedding::gather(std::span<const int32_t> tokens, float* out) const {
  const int64_t k = table_.k;
  for (const int32_t token : tokens) {
    CHECK_MSG(token >= 0 && token < table_.n, "token {} outside 0..{}", token, table_.n - 1);
    const std::byte* row = table_.codes.data() + token * table_.row_bytes();
    if (table_.format.code == WeightCode::kF32) {
      std::copy_n(reinterpret_cast<const float*>(row), k, out);
    } else {
      const auto* halves = reinterpret_cast<const uint16_t*>(row);
      const auto widen = table_.format.code == WeightCode::kBf16 ? bf16_to_f32 : f16_to_f32;
      std::transform(halves, halves + k, out, widen);
    }
    out += k;
  }
}

}  // namespace nibble
