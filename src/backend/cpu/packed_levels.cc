#include <cstring>

#include "backend/cpu/packing.h"

namespace nibble::cpu {

void PackedMatrix::pack_levels(std::span<const RowSource> rows, int64_t tile) {
  const int64_t groups = format_.groups(k_);
  auto* out = reinterpret_cast<uint8_t*>(levels_.data()) + tile * groups * kLevelBytes;
  std::memset(out, 0, static_cast<size_t>(groups * kLevelBytes));
  float* scales = scales_.as<float>().data() + tile * kTileRows;
  for (size_t lane = 0; lane < rows.size(); ++lane) {
    const auto [part, row] = rows[lane];
    scales[lane] = 0.0F;
    if (part == nullptr) {
      continue;
    }
    const RowLevels levels = levels_of(*part, row);
    scales[lane] = levels.channel;
    for (int64_t g = 0; g < groups; ++g) {
      uint8_t* at = out + g * kLevelBytes + lane;
      at[0] = levels.steps[static_cast<size_t>(g)];
      at[kTileRows] = static_cast<uint8_t>(part->zeros[row * groups + g] - kLowestCode);
    }
  }
}

void PackedMatrix::unpack_levels(QuantTensor& weight, int64_t row, int64_t place) const {
  const int64_t groups = format_.groups(k_);
  const int64_t tile = place / kTileRows;
  const int64_t lane = place % kTileRows;
  const auto* from = reinterpret_cast<const uint8_t*>(levels_.data()) + lane;
  const float channel = scales_.as<float>()[static_cast<size_t>(place)];
  for (int64_t g = 0; g < groups; ++g) {
    const uint8_t* at = from + (tile * groups + g) * kLevelBytes;
    const auto to = static_cast<size_t>(row * groups + g);
    weight.scales.as<float>()[to] = channel * static_cast<float>(at[0]);  // exact
    weight.zeros.as<int8_t>()[to] = static_cast<int8_t>(at[kTileRows] + kLowestCode);
  }
}

}  // namespace nibble::cpu
