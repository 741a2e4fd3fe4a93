#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "backend/backend.h"

namespace nibble::cpu {

/// A table in F32, F16 or BF16, where it lies in the file: of a large one only the rows of tokens
/// that occur are ever resident.
class CpuTable final : public PreparedTable {
 public:
  /// `table` must not be quantized; `owner` keeps its memory.
  CpuTable(QuantView table, std::shared_ptr<const void> owner);

  [[nodiscard]] int64_t rows() const override { return table_.n; }
  [[nodiscard]] int64_t width() const override { return table_.k; }
  void gather(const Step& step, float* out) const override;
  void add_positions(const Step& step, int64_t first, float* out) const override;

 private:
  /// Elements begin, begin + 1 .. of a row, as f32.
  void read(int64_t row, int64_t begin, std::span<float> to) const;

  QuantView table_;
  std::shared_ptr<const void> owner_;
};

}  // namespace nibble::cpu
