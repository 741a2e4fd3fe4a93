#include "quantizer/algorithms/nearest.h"

#include <algorithm>
#include <cmath>

#include "base/math.h"
#include "quant/codec.h"
#include "quantizer/algorithms/rtn.h"
#include "quantizer/encoders/int_scales.h"

namespace nibble {
namespace {

/// The scales [n, groups] of FP8 codes: the largest magnitude that a scale covers over 448.
void choose_fp8_scales(const PlainMatrix& matrix, const WeightFormat& format, float* scales) {
  const int64_t groups = format.groups(matrix.k);
  int64_t rows = 1;  // that share a scale
  if (format.scale_per == ScalePer::kTensor) {
    rows = matrix.n;
  } else if (format.scale_per == ScalePer::kBlock) {
    rows = format.group_size;
  }
  const int64_t width = format.grouped() ? format.group_size : matrix.k;
  for (int64_t row = 0; row < matrix.n; row += rows) {
    const int64_t end = std::min(matrix.n, row + rows);
    for (int64_t group = 0; group < groups; ++group) {
      float absmax = 0;
      for (int64_t r = row; r < end; ++r) {
        for (int64_t i = group * width; i < std::min(matrix.k, (group + 1) * width); ++i) {
          absmax = std::max(absmax, std::fabs(matrix.w[static_cast<size_t>(r * matrix.k + i)]));
        }
      }
      for (int64_t r = row; r < end; ++r) {
        scales[r * groups + group] = fp8_scale(absmax);
      }
    }
  }
}

}  // namespace

Result<PlainMatrix> read_matrix(const SourceMatrix& source, const CheckpointReader* reader) {
  PlainMatrix matrix{.n = source.n(), .k = source.k(), .w = {}};
  matrix.w.resize(static_cast<size_t>(matrix.n * matrix.k));
  NIBBLE_RETURN_IF_ERROR(reader == nullptr
                             ? source.decode(0, matrix.n, matrix.w.data())
                             : decode_once(source, *reader, {0, matrix.n}, matrix.w.data()));
  NIBBLE_RETURN_IF_ERROR(
      absmax_of(matrix.w.data(), 0, matrix.n, matrix.k).status().with_context(source.where()));
  return matrix;
}

Result<QuantTensor> nearest_codes(const PlainMatrix& matrix,
                                  const QuantScheme& scheme,
                                  Dialect dialect,
                                  ThreadPool& pool) {
  const WeightFormat& format = scheme.weight;
  NIBBLE_ASSIGN_OR_RETURN(const auto encoder,
                          make_encoder({.scheme = scheme, .dialect = dialect}, matrix.n, matrix.k));
  NIBBLE_ASSIGN_OR_RETURN(QuantTensor out, QuantTensor::allocate(format, matrix.n, matrix.k));
  auto* scales = out.scales.as<float>().data();
  if (encoder->takes_given_rows()) {
    RoundedMatrix chosen;
    choose_all_scales({.w = matrix.w.data(),
                       .n = matrix.n,
                       .k = matrix.k,
                       .format = format,
                       .encoder = encoder.get()},
                      nullptr, chosen, pool);
    std::ranges::copy(chosen.scales, scales);
    std::ranges::transform(chosen.zeros, out.zeros.as<int8_t>().data(),
                           [](float zero) { return static_cast<int8_t>(zero); });
  } else if (format.code == WeightCode::kFp8E4M3) {
    choose_fp8_scales(matrix, format, scales);
  } else {
    return make_error(StatusCode::kUnsupported, "{}: has no codes to be rounded to", scheme.name);
  }
  const int64_t groups = format.groups(matrix.k);
  const int8_t* zeros = out.zeros.size() == 0 ? nullptr : out.zeros.as<int8_t>().data();
  pool.parallel_for(matrix.n, [&](int64_t row, int) {
    encode_row(format, matrix.w.data() + row * matrix.k, matrix.k,
               {scales + row * groups, zeros == nullptr ? nullptr : zeros + row * groups},
               out.codes.data() + row * out.row_bytes());
  });
  return out;
}

void decode_rows(const QuantTensor& tensor, float* out, ThreadPool& pool) {
  pool.parallel_for(tensor.n,
                    [&](int64_t row, int) { decode_row(tensor, row, out + row * tensor.k); });
}

}  // namespace nibble
