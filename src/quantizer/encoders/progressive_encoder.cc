#include <algorithm>
#include <cmath>

#include "quant/codec.h"
#include "quantizer/encoders/int_scales.h"
#include "quantizer/encoders/row_encoder.h"

namespace nibble {
namespace {

constexpr CodeRange kRange = code_range(WeightCode::kInt4);
constexpr float kLeastScale = 0x1p-23F;   // what Quark stores for rows of zeros
constexpr float kLeastRatio = 0x1p-100F;  // keeps the second scale of vanishing rows normal

/// INT4 per channel in two stages of scales: one of the tensor and one of each row.
class ProgressiveEncoder final : public RowEncoder {
 public:
  using RowEncoder::RowEncoder;

  [[nodiscard]] bool needs_extent() const override { return true; }

  Status encode(int64_t row,
                int64_t rows,
                const float* x,
                const Extent& extent,
                std::span<std::byte* const> out,
                RowsError& error) const override {
    return encode_rows({row, rows, x}, extent, out, error);
  }

  [[nodiscard]] bool takes_given_rows() const override { return rule_ != ScaleRule::kQuark; }

  void choose_scales(const ScaleSearch& search, float* scales, float* /*zeros*/) const override {
    for (int64_t i = 0; i < search.rows; ++i) {
      const float* values = search.x + i * k_;
      float absmax = 0;
      kernels_.absmax(values, 1, k_, &absmax);
      scales[i] = choose(values, absmax, search.importance);
    }
  }

  Status encode_given(const GivenRows& given,
                      const Extent& extent,
                      std::span<std::byte* const> out,
                      RowsError& error) const override {
    return encode_rows(rows_of(given), extent, out, error);
  }

 private:
  Status encode_rows(const Rows& all,
                     const Extent& extent,
                     std::span<std::byte* const> out,
                     RowsError& error) const {
    Tally tally;
    const bool exact = rule_ != ScaleRule::kQuark;
    const float first = exact ? power_scale(extent.absmax) : quark_scale(extent.absmax);
    for (int64_t i = 0; i < all.rows; ++i) {
      const float* values = all.x + i * k_;
      float absmax = 0;
      NIBBLE_RETURN_IF_ERROR(find_absmax(all, values, 1, k_, &absmax));
      std::byte* codes = out[0] + i * code_row_bytes();
      Encoded part = {.x = values, .groups = 1, .width = k_, .absmax = &absmax};
      part.original = original_of(all, part);
      const float given = all.given == nullptr ? 0.0F : all.given->scales[i];
      const float second = exact ? encode_exact(part, first, given, codes, tally)
                                 : encode_quark(values, absmax, first, codes, tally);
      kernels_.reorder(reinterpret_cast<uint8_t*>(codes), code_row_bytes() / 4);
      clear_padding(codes);
      store_scales(DType::kF32, &second, 1, out[2] + i * 4);
    }
    if (all.row == 0) {
      store_scales(DType::kF32, &first, 1, out[1]);
    }
    error = total(tally);
    return {};
  }

  /// A power of two at or above absmax / 448: products with it are exact, and no code times its
  /// second scale leaves the range of the FP8 stage by more than the rounding of codes.
  static float power_scale(float absmax) {
    if (vanishes(absmax)) {
      return kLeastScale;
    }
    int exponent = 0;
    const float fraction = std::frexp(absmax / kE4M3Max, &exponent);
    return std::ldexp(1.0F, fraction == 0.5F ? exponent - 1 : exponent);
  }

  /// Capped so that code -8, which stands for -7.5 steps, stays finite.
  static float quark_scale(float absmax) {
    constexpr float kMost = 3.1e38F;
    return vanishes(absmax) ? kLeastScale : std::min(absmax, kMost) / kE4M3Max;
  }

  float choose(const float* x, float absmax, const float* importance) const {
    float scale = 0;
    int_scales(kernels_, format_, resolve_rule(rule_, format_),
               {.x = x,
                .groups = 1,
                .width = k_,
                .absmax = &absmax,
                .importance = importance,
                .low = kRange.low,
                .high = kRange.high},
               &scale);
    return scale;
  }

  /// given: the scale of values that are chosen already; 0: it is to be chosen.
  float encode_exact(Encoded part, float first, float given, std::byte* codes, Tally& tally) const {
    float scale = given != 0 ? given : choose(part.x, *part.absmax, nullptr);
    const float least = first * kLeastRatio;
    scale = std::fabs(scale) < least ? least : scale;
    part.scales = &scale;
    encode_groups(kernels_.int4, part, codes, tally);
    return scale / first;
  }

  float encode_quark(
      const float* x, float absmax, float first, std::byte* codes, Tally& tally) const {
    // Rounding to FP8 keeps order: the largest of the row stays the largest.
    const float stage = decode_e4m3(encode_e4m3(absmax / first));
    const float second = std::max(stage / (kRange.high + 0.5F), kLeastScale);
    const float scale = second * first;
    const Encoded encoded = {.x = x, .groups = 1, .width = k_, .absmax = &absmax, .scales = &scale};
    const bool slow = extreme(encoded);
    rows::Sums unused;
    note(encoded, tally);
    kernels_.progressive({.x = x,
                          .width = k_,
                          .fp8_scale = first,
                          .inverse = 1.0F / second,
                          .scale = scale,
                          .codes = reinterpret_cast<uint8_t*>(codes)},
                         slow ? unused : tally.sums);
    if (slow) {
      tally.rest.clipped += unused.clipped;
      std::vector<float> decoded(static_cast<size_t>(k_));
      for (int64_t i = 0; i < k_; ++i) {
        const int nibble = std::to_integer<int>(codes[i / 2]) >> (i % 2 * 4) & 15;
        decoded[static_cast<size_t>(i)] = static_cast<float>(nibble - 8) * scale;
      }
      add_decoded(x, decoded.data(), k_, tally.rest);
    }
    return second;
  }

  /// Padding that was 0 in offset binary is -8 in two's complement: make it 0 again.
  void clear_padding(std::byte* codes) const {
    constexpr int kSlots[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // of element i
    for (int64_t i = k_ % 8; i % 8 != 0; ++i) {
      std::byte* word = codes + code_row_bytes() - 4;
      const int slot = kSlots[i];
      word[slot / 2] &= slot % 2 == 0 ? std::byte{0xf0} : std::byte{0x0f};
    }
  }
};

}  // namespace

EncoderPointer make_progressive_encoder(const EncoderOptions& options,
                                        const rows::RowKernels& kernels,
                                        int64_t n,
                                        int64_t k) {
  return std::make_unique<ProgressiveEncoder>(options, kernels, n, k);
}

}  // namespace nibble
