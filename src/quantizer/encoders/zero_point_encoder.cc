#include <algorithm>
#include <cmath>
#include <cstring>

#include "quant/codec.h"
#include "quantizer/encoders/int_scales.h"
#include "quantizer/encoders/row_encoder.h"

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

/// INT4 in groups with zero points.
class ZeroPointEncoder final : public RowEncoder {
 public:
  using RowEncoder::RowEncoder;

  Status encode(int64_t row,
                int64_t rows,
                const float* x,
                const Extent& /*extent*/,
                std::span<std::byte* const> out,
                RowsError& error) const override {
    return encode_rows({row, rows, x}, out, error);
  }

  [[nodiscard]] bool takes_given_rows() const override { return true; }

  void choose_scales(const ScaleSearch& search, float* scales, float* zeros) const override {
    std::vector<float> memory;
    const int64_t width = format_.group_size;
    const int64_t all = search.rows * format_.groups(k_);
    for (int64_t g = 0; g < all; g += rows::kMostGroups) {
      const int64_t groups = std::min(rows::kMostGroups, all - g);
      float absmax[rows::kMostGroups];
      const Encoded part = {.x = search.x + g * width, .groups = groups, .width = width};
      kernels_.absmax(part.x, groups, width, absmax);
      choose(part, {absmax, importance_of(search, g, groups, memory)}, scales + g, zeros + g);
    }
  }

  Status encode_given(const GivenRows& given,
                      const Extent& /*extent*/,
                      std::span<std::byte* const> out,
                      RowsError& error) const override {
    return encode_rows(rows_of(given), out, error);
  }

 private:
  struct Facts {
    const float* absmax = nullptr;      // [groups]
    const float* importance = nullptr;  // [groups, width] or null
  };

  Status encode_rows(const Rows& all, std::span<std::byte* const> out, RowsError& error) const {
    Tally tally;
    const int64_t per_row = format_.groups(k_);
    const int64_t width = format_.group_size;
    const int64_t groups_in_all = all.rows * per_row;
    const auto words = (all.rows + kRowsPerWord - 1) / kRowsPerWord * per_row;
    std::memset(out[2], 0, static_cast<size_t>(words) * 4);
    for (int64_t g = 0; g < groups_in_all; g += rows::kMostGroups) {
      const int64_t groups = std::min(rows::kMostGroups, groups_in_all - g);
      Encoded part = {.x = all.x + g * width, .groups = groups, .width = width};
      float absmax[rows::kMostGroups];
      float scales[rows::kMostGroups];
      float zeros[rows::kMostGroups];
      NIBBLE_RETURN_IF_ERROR(find_absmax(all, part.x, groups, width, absmax));
      if (all.given == nullptr) {
        choose(part, {absmax, nullptr}, scales, zeros);
      } else {
        std::copy_n(all.given->scales + g, groups, scales);
        std::copy_n(all.given->zeros + g, groups, zeros);
        part.original = original_of(all, part);
      }
      part.absmax = absmax;
      part.scales = scales;
      part.zeros = zeros;
      encode_groups(kernels_.int4_zeros, part, out[0] + g * width / 2, tally);
      store_scales(format_.scale_dtype, scales, groups, out[1] + g * scale_bytes());
      for (int64_t i = 0; i < groups; ++i) {
        store_zero(g + i, static_cast<int>(zeros[i]), out[2]);
      }
    }
    write_shape(all.row, out[3]);
    error = total(tally);
    return {};
  }

  [[nodiscard]] int64_t scale_bytes() const { return dtype_bits(format_.scale_dtype) / 8; }

  void choose(const Encoded& part, const Facts& facts, float* scales, float* zeros) const {
    float low[rows::kMostGroups];
    float high[rows::kMostGroups];
    float factors[rows::kMostGroups];
    std::fill(factors, factors + rows::kMostGroups, 1.0F);
    kernels_.minmax(part.x, part.groups, part.width, low, high);
    for (int64_t g = 0; g < part.groups; ++g) {
      low[g] = std::min(low[g], 0.0F);
      high[g] = std::max(high[g], 0.0F);
    }
    if (rule_ != ScaleRule::kMinMax) {
      kernels_.shrink({.x = part.x,
                       .groups = part.groups,
                       .width = part.width,
                       .absmax = facts.absmax,
                       .importance = facts.importance,
                       .low = kRange.low,
                       .high = kRange.high},
                      low, high, factors);
    }
    for (int64_t g = 0; g < part.groups; ++g) {
      const Parameters chosen =
          parameters(format_.scale_dtype, low[g] * factors[g], high[g] * factors[g]);
      scales[g] = chosen.scale;
      zeros[g] = chosen.zero;
    }
  }

  /// Group `index` of this block of rows: word [row / 8, group], offset binary.
  void store_zero(int64_t index, int zero, std::byte* words) const {
    const int64_t per_row = format_.groups(k_);
    const int64_t row = index / per_row;
    std::byte* word = words + (row / kRowsPerWord * per_row + index % per_row) * 4;
    uint32_t bits = 0;
    std::memcpy(&bits, word, 4);
    bits |= static_cast<uint32_t>(zero + 8) << (row % kRowsPerWord * 4);
    std::memcpy(word, &bits, 4);
  }
};

}  // namespace

EncoderPointer make_zero_point_encoder(const EncoderOptions& options,
                                       const rows::RowKernels& kernels,
                                       int64_t n,
                                       int64_t k) {
  return std::make_unique<ZeroPointEncoder>(options, kernels, n, k);
}

}  // namespace nibble
