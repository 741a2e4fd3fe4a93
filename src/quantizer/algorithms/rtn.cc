#include "quantizer/algorithms/rtn.h"

#include <algorithm>

#include "base/math.h"
#include "quant/codec.h"

namespace nibble {
namespace {

constexpr int64_t kRows = 16;  // that one thread takes at once

float nearest(const WeightFormat& format, float w, float scale, float zero) {
  if (format.code == WeightCode::kFp4E2M1) {
    return decode_e2m1(encode_e2m1(w / scale)) * scale;
  }
  const auto code = static_cast<float>(encode_int(w, scale, zero, code_range(format.code)));
  return (code - zero) * scale;
}

}  // namespace

void choose_all_scales(const MatrixToRound& matrix,
                       const float* importance,
                       RoundedMatrix& rounded,
                       ThreadPool& pool) {
  const int64_t groups = matrix.format.groups(matrix.k);
  const bool zeros = matrix.format.zero_points == ZeroPoints::kPerScale;
  rounded.scales.resize(static_cast<size_t>(matrix.n * groups));
  rounded.zeros.resize(zeros ? rounded.scales.size() : 0);
  pool.parallel_for(ceil_div(matrix.n, kRows), [&](int64_t piece, int) {
    const int64_t row = piece * kRows;
    matrix.encoder->choose_scales({.rows = std::min(kRows, matrix.n - row),
                                   .x = matrix.w + row * matrix.k,
                                   .importance = importance},
                                  rounded.scales.data() + row * groups,
                                  zeros ? rounded.zeros.data() + row * groups : nullptr);
  });
}

void round_to_nearest(const MatrixToRound& matrix,
                      const float* importance,
                      RoundedMatrix& rounded,
                      ThreadPool& pool) {
  choose_all_scales(matrix, importance, rounded, pool);
  const int64_t groups = matrix.format.groups(matrix.k);
  const int64_t width = matrix.k / groups;
  rounded.values.resize(static_cast<size_t>(matrix.n * matrix.k));
  pool.parallel_for(matrix.n, [&](int64_t row, int) {
    const float* w = matrix.w + row * matrix.k;
    float* out = rounded.values.data() + row * matrix.k;
    for (int64_t i = 0; i < matrix.k; ++i) {
      const auto at = static_cast<size_t>(row * groups + i / width);
      out[i] = nearest(matrix.format, w[i], rounded.scales[at],
                       rounded.zeros.empty() ? 0.0F : rounded.zeros[at]);
    }
  });
}

}  // namespace nibble
