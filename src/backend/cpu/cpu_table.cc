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
  const std::byte* from = table_.code_row(row) + begin * element;
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

void CpuTable::gather(const Step& step, float* out) const {
  const int64_t k = table_.k;
  for (const int32_t token : step.input().tokens) {
    CHECK_MSG(token >= 0 && token < table_.n, "token {} outside 0..{}", token, table_.n - 1);
    read(token, 0, {out, static_cast<size_t>(k)});
    out += k;
  }
}

void CpuTable::add_positions(const Step& step, int64_t first, float* out) const {
  constexpr int64_t kPiece = 256;
  float values[kPiece];
  const int32_t* positions = step.positions();
  for (int64_t r = 0; r < step.rows(); ++r, out += table_.k) {
    const int64_t row = first + positions[r];
    CHECK_LT(row, table_.n);
    for (int64_t begin = 0; begin < table_.k; begin += kPiece) {
      const auto count = static_cast<size_t>(std::min(kPiece, table_.k - begin));
      read(row, begin, {values, count});
      std::transform(values, values + count, out + begin, out + begin, std::plus<>());
    }
  }
}

}  // namespace nibble::cpu
