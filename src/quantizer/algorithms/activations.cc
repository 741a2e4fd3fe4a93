#include "quantizer/algorithms/activations.h"

#include <algorithm>
#include <cmath>

#include "quant/codec.h"

namespace nibble {

void round_activations(ActFormat act, const ActivationRows& rows, ThreadPool& pool) {
  constexpr float kMost = 127.0F;
  if (act != ActFormat::kInt8Token) {
    return;
  }
  pool.parallel_for(rows.rows, [&](int64_t row, int) {
    float* at = rows.x + row * rows.k;
    float largest = 0;
    for (int64_t i = 0; i < rows.k; ++i) {
      largest = std::max(largest, std::fabs(at[i]));
    }
    const float scale = largest / kMost;
    for (int64_t i = 0; scale > 0 && i < rows.k; ++i) {
      at[i] = round_half_even(at[i] / scale) * scale;
    }
  });
}

}  // namespace nibble
