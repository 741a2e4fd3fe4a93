#pragma once

#include <cstdint>
#include <memory>

#include "backend/backend.h"

namespace nibble::cpu {

/// A token table in F32, F16 or BF16, where it lies in the file: of a large one only the rows of
/// tokens that occur are ever resident.
class CpuTable final : public PreparedTable {
 public:
  /// `table` must not be quantized; `owner` keeps its memory.
  CpuTable(QuantView table, std::shared_ptr<const void> owner);

  [[nodiscard]] int64_t rows() const override { return table_.n; }
  [[nodiscard]] int64_t width() const override { return table_.k; }
  void gather(const Step& step, float* out) const override;

 private:
  QuantView table_;
  std::shared_ptr<const void> owner_;
};

}  // namespace nibble::cpu
