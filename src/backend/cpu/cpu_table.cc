#include "backend/cpu/cpu_table.h"

#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/f16.h"

namespace nibble::cpu {

CpuTable::CpuTable(QuantView table, std::shared_ptr<const void> owner)
    : table_(std::move(table)), owner_(std::move(owner)) {
  CHECK(!table_.format.quantized());
}

void CpuTable::gather(const Step& step, float* out) const {
  const int64_t k = table_.k;
  for (const int32_t token : step.input().tokens) {
    CHECK_MSG(token >= 0 && token < table_.n, "token {} outside 0..{}", token, table_.n - 1);
    const std::byte* row = table_.codes + token * table_.row_bytes();
    if (table_.format.code == WeightCode::kF32) {
      std::memcpy(out, row, static_cast<size_t>(k) * sizeof(float));
    } else {
      const auto widen = table_.format.code == WeightCode::kBf16 ? bf16_to_f32 : f16_to_f32;
      for (int64_t i = 0; i < k; ++i) {  // files align tensors to nothing
        uint16_t half = 0;
        std::memcpy(&half, row + i * 2, sizeof half);
        out[i] = widen(half);
      }
    }
    out += k;
  }
}

}  // namespace nibble::cpu
