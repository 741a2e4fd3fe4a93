#include "quantizer/encoders/zero_point_encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/codec.h"
#include "quantizer/encoders/int_scales.h"

namespace nibble {
namespace {

constexpr int64_t kRowsPerWord = 8;  // zero points are packed along the rows
constexpr CodeRange kRange = code_range(WeightCode::kInt4);
constexpr float kSteps = kRange.high - kRange.low;

struct Parameters {
  float scale = 0;
  float zero = 0;
};

/// Scale and zero point of weights from low to high, which contain 0: those of compressed-tensors.
Parameters parameters(DType scale_dtype, float low, float high) {
  const float width = high - low;
  const float range = std::isfinite(width) ? width / kSteps : high / kSteps - low / kSteps;
  Parameters result;
  result.scale = vanishes(range) ? zero_scale(scale_dtype) : stored_scale(scale_dtype, range, 1);
  // Where the outermost value would be infinite the scale shrinks.
  for (float shrunk = result.scale;; shrunk *= 0.99F) {
    result.scale = stored_scale(scale_dtype, shrunk, 1);
    const float exact = kRange.low - low / result.scale;
    result.zero = round_half_even(std::min(std::max(exact, kRange.low), kRange.high));
    const float most = std::max(kRange.high - result.zero, result.zero - kRange.low);
    if (std::isfinite(most * result.scale)) {
      return result;
    }
  }
}

}  // namespace

Status ZeroPointEncoder::encode(int64_t row,
                                int64_t rows,
                                const float* x,
                                const Extent& /*extent*/,
                                std::span<std::byte* const> out,
                                RowsError& error) const {
  float absmax = 0;
  NIBBLE_RETURN_IF_ERROR(find_absmax({row, rows, x}, x, 1, rows * k_, &absmax));
  std::vector<float> scales(static_cast<size_t>(rows * format_.groups(k_)));
  std::vector<float> zeros(scales.size());
  choose_scales({.rows = rows, .x = x}, scales.data(), zeros.data());
  return encode_rows({row, rows, x}, {scales.data(), zeros.data()}, out, error);
}

Status ZeroPointEncoder::encode_given(const GivenRows& given,
                                      const Extent& /*extent*/,
                                      std::span<std::byte* const> out,
                                      RowsError& error) const {
  float absmax = 0;
  NIBBLE_RETURN_IF_ERROR(find_absmax(rows_of(given), given.values, 1, given.rows * k_, &absmax));
  return encode_rows(rows_of(given), {given.scales, given.zeros}, out, error);
}

void ZeroPointEncoder::choose_scales(const ScaleSearch& search, float* scales, float* zeros) const {
  const int64_t all = search.rows * format_.groups(k_);
  Range ranges[rows::kMostGroups];
  for (int64_t first = 0; first < all; first += rows::kMostGroups) {
    const int64_t groups = std::min(rows::kMostGroups, all - first);
    choose_ranges(search, first, groups, ranges);
    for (int64_t g = 0; g < groups; ++g) {
      const Parameters chosen = parameters(format_.scale_dtype, ranges[g].low, ranges[g].high);
      scales[first + g] = chosen.scale;
      zeros[first + g] = chosen.zero;
    }
  }
}

void ZeroPointEncoder::choose_ranges(const ScaleSearch& search,
                                     int64_t first,
                                     int64_t groups,
                                     Range* ranges) const {
  const int64_t width = format_.group_size;
  const float* x = search.x + first * width;
  float low[rows::kMostGroups];
  float high[rows::kMostGroups];
  float factors[rows::kMostGroups];
  std::fill(factors, factors + rows::kMostGroups, 1.0F);
  kernels_.minmax(x, groups, width, low, high);
  for (int64_t g = 0; g < groups; ++g) {
    low[g] = std::min(low[g], 0.0F);
    high[g] = std::max(high[g], 0.0F);
  }
  if (rule_ != ScaleRule::kMinMax) {
    std::vector<float> memory;
    kernels_.shrink({.x = x,
                     .groups = groups,
                     .width = width,
                     .importance = importance_of(search, first, groups, memory),
                     .low = kRange.low,
                     .high = kRange.high},
                    low, high, factors);
  }
  for (int64_t g = 0; g < groups; ++g) {
    ranges[g] = {low[g] * factors[g], high[g] * factors[g]};
  }
}

Status ZeroPointEncoder::encode_rows(const Rows& all,
                                     const Numbers& numbers,
                                     std::span<std::byte* const> out,
                                     RowsError& error) const {
  Tally tally;
  const int64_t per_row = format_.groups(k_);
  const int64_t width = format_.group_size;
  const int64_t groups_in_all = all.rows * per_row;
  const int64_t scale_bytes = dtype_bits(format_.scale_dtype) / 8;
  const auto words = (all.rows + kRowsPerWord - 1) / kRowsPerWord * per_row;
  std::memset(out[2], 0, static_cast<size_t>(words) * 4);
  for (int64_t g = 0; g < groups_in_all; g += rows::kMostGroups) {
    Encoded part = {.x = all.x + g * width,
                    .groups = std::min(rows::kMostGroups, groups_in_all - g),
                    .width = width,
                    .scales = numbers.scales + g,
                    .zeros = numbers.zeros + g};
    float absmax[rows::kMostGroups];
    kernels_.absmax(part.x, part.groups, width, absmax);
    part.absmax = absmax;
    part.original = original_of(all, part);
    encode_groups(kernels_.int4_zeros, part, out[0] + g * width / 2, tally);
    store_scales(format_.scale_dtype, part.scales, part.groups, out[1] + g * scale_bytes);
    for (int64_t i = 0; i < part.groups; ++i) {
      store_zero(g + i, static_cast<int>(part.zeros[i]), out[2]);
    }
  }
  write_shape(all.row, out[3]);
  error = total(tally);
  return {};
}

/// Group `index` of this block of rows: word [row / 8, group], offset binary.
void ZeroPointEncoder::store_zero(int64_t index, int zero, std::byte* words) const {
  const int64_t per_row = format_.groups(k_);
  const int64_t row = index / per_row;
  std::byte* word = words + (row / kRowsPerWord * per_row + index % per_row) * 4;
  uint32_t bits = 0;
  std::memcpy(&bits, word, 4);
  bits |= static_cast<uint32_t>(zero + 8) << (row % kRowsPerWord * 4);
  std::memcpy(word, &bits, 4);
}

EncoderPointer make_zero_point_encoder(const EncoderOptions& options,
                                       const rows::RowKernels& kernels,
                                       int64_t n,
                                       int64_t k) {
  return std::make_unique<ZeroPointEncoder>(options, kernels, n, k);
}

}  // namespace nibble
