#include "backend/cpu/cpu_table.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "base/check.h"
#include "base/f16.h"

namespace nibble::cpu {

CpuTable::CpuTable(QuantView table, std::shared_ptr<const void> owner)
    : table_(std::move(table)), owner_(std::move(owner)) {
  CHECK(!table_.format.quantized());
}

void CpuTable::read(int64_t row, int64_t begin, std::span<float> to) const {
  const int64_t element = table_.format.code == WeightCode::kF32 ? 4 : 2;
  const std::byte* from = table_.codes + row * table_.row_bytes() + begin * element;
  if (table_.format.code == WeightCode::kF32) {
    std::memcpy(to.data(), from, to.size_bytes());
    return;
  }
  const auto widen = table_.format.code == WeightCode::kBf16 ? bf16_to_f32 : f16_to_f32;
  for (float& value : to) {  // files align tensors to nothing
    uint16_t half = 0;
    std::memcpy(&half, from, sizeof half);
    value = widen(half);
    from += sizeof half;
  }
}

void CpuTable::gather(const StepInput& input, const StepShape& /*shape*/, float* out) const {
  const int64_t k = table_.k;
  for (const int32_t token : input.tokens) {
    CHECK_MSG(token >= 0 && token < table_.n, "token {} outside 0..{}", token, table_.n - 1);
    read(token, 0, {out, static_cast<size_t>(k)});
    out += k;
  }
}

void CpuTable::add_positions(const StepInput& input,
                             const StepShape& /*shape*/,
                             int64_t first,
                             float* out) const {
  constexpr int64_t kPiece = 256;
  float values[kPiece];
  for (const SequenceSpan& sequence : input.sequences) {
    const int64_t oldest = first + sequence.kv_len - sequence.q_len;
    CHECK_LE(oldest + sequence.q_len, table_.n);
    for (int64_t i = 0; i < sequence.q_len; ++i) {
      float* row = out + (sequence.q_begin + i) * table_.k;
      for (int64_t begin = 0; begin < table_.k; begin += kPiece) {
        const auto count = static_cast<size_t>(std::min(kPiece, table_.k - begin));
        read(oldest + i, begin, {values, count});
        std::transform(values, values + count, row + begin, row + begin, std::plus<>());
      }
    }
  }
}

}  // namespace nibble::cpu
