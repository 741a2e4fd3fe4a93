#include "quantizer/algorithms/learned.h"

#include "base/f16.h"

namespace nibble {

void BestRows::keep(RowTile& tile) {
  const std::vector<double> losses = tile.losses();
  if (losses_.empty()) {
    losses_ = losses;
    values_.assign(tile.values(), tile.values() + tile.k() * RowTile::kRows);
    scales_.assign(tile.scales(), tile.scales() + tile.groups() * RowTile::kRows);
    return;
  }
  std::vector<int64_t> better;
  for (int64_t row = 0; row < tile.rows(); ++row) {
    if (losses[static_cast<size_t>(row)] < losses_[static_cast<size_t>(row)]) {
      losses_[static_cast<size_t>(row)] = losses[static_cast<size_t>(row)];
      better.push_back(row);
    }
  }
  const auto copy_rows = [&](const float* from, int64_t columns, std::vector<float>& to) {
    for (int64_t i = 0; i < columns * RowTile::kRows; i += RowTile::kRows) {
      for (const int64_t row : better) {
        to[static_cast<size_t>(i + row)] = from[i + row];
      }
    }
  };
  copy_rows(tile.values(), tile.k(), values_);
  copy_rows(tile.scales(), tile.groups(), scales_);
}

void BestRows::restore(RowTile& tile) const {
  std::copy(values_.begin(), values_.end(), tile.values());
  std::copy(scales_.begin(), scales_.end(), tile.scales());
}

float as_stored(const WeightFormat& format, float scale) {
  return format.scale_dtype == DType::kBF16 ? bf16_to_f32(f32_to_bf16(scale)) : scale;
}

}  // namespace nibble
