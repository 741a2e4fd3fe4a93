#include "layers/norm.h"

#include <cmath>
#include <numeric>
#include <vector>

#include "base/check.h"

namespace nibble {

void Norm::apply(Backend& backend, std::span<float> rows) const {
  const size_t width = weight_.size() / sizeof(float);
  CHECK_EQ(rows.size() % width, size_t{0});
  std::vector<float> weight(width);
  std::vector<float> bias(bias_.size() / sizeof(float));  // none: RMSNorm
  backend.read(weight_.as<float>(), weight);
  if (!bias.empty()) {
    backend.read(bias_.as<float>(), bias);
  }
  for (; !rows.empty(); rows = rows.subspan(width)) {
    const std::span<float> row = rows.first(width);
    const double mean =
        bias.empty() ? 0.0
                     : std::accumulate(row.begin(), row.end(), 0.0) / static_cast<double>(width);
    double squares = 0.0;
    for (const float x : row) {
      squares += (x - mean) * (x - mean);
    }
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(width) + eps_);
    for (size_t i = 0; i < width; ++i) {
      row[i] =
          static_cast<float>((row[i] - mean) * scale * weight[i] + (bias.empty() ? 0.0F : bias[i]));
    }
  }
}

}  // namespace nibble
