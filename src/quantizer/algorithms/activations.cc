#include "quantizer/algorithms/activations.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "quant/codec.h"

namespace nibble {
namespace {

constexpr float kInt8Max = 127.0F;
constexpr int64_t kFp8GroupSize = 128;

/// Numbers that share a scale.
void round_together(ActFormat act, float* x, int64_t count) {
  float absmax = 0;
  for (int64_t i = 0; i < count; ++i) {
    absmax = std::max(absmax, std::fabs(x[i]));
  }
  const bool integer = act == ActFormat::kInt8Token;
  const float top = integer ? kInt8Max : kE4M3Max;
  const float scale = absmax / top;
  const float factor = top / absmax;
  if (!(scale > 0) || !std::isfinite(factor)) {
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float code = x[i] * factor;
    x[i] = (integer ? round_half_even(code) : decode_e4m3(encode_e4m3(code))) * scale;
  }
}

}  // namespace

void round_row(ActFormat act, float* row, int64_t k) {
  if (!rounds_rows(act)) {
    return;
  }
  CHECK(act != ActFormat::kIntBlocks);  // which takes more than a format: round_blocks()
  const int64_t together = act == ActFormat::kFp8Group ? kFp8GroupSize : k;
  for (int64_t begin = 0; begin < k; begin += together) {
    round_together(act, row + begin, std::min(together, k - begin));
  }
}

void round_activations(ActFormat act, const ActivationRows& rows, ThreadPool& pool) {
  if (rounds_rows(act)) {
    pool.parallel_for(rows.rows,
                      [&](int64_t row, int) { round_row(act, rows.x + row * rows.k, rows.k); });
  }
}

}  // namespace nibble
