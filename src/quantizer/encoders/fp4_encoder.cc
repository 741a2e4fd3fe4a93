#include <algorithm>
#include <bit>

#include "quant/codec.h"
#include "quantizer/encoders/row_encoder.h"

namespace nibble {
namespace {

constexpr int kMostExponent = 252;  // 6 * 2^(252 - 127) is finite

/// The power of two that the "even" rule takes: that of absmax rounded to one bit of mantissa, less
/// the two octaves up to 4.
float even_power(float absmax) {
  const uint32_t bits = std::bit_cast<uint32_t>(absmax) + 0x200000U;
  const int exponent = static_cast<int>(bits >> 23) - 2;
  return decode_e8m0(static_cast<uint8_t>(std::clamp(exponent, 0, kMostExponent)));
}

/// E2M1 in groups with a power of two each.
class Fp4Encoder final : public RowEncoder {
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

  void choose_scales(const ScaleSearch& search, float* scales, float* /*zeros*/) const override {
    std::vector<float> memory;
    const int64_t width = format_.group_size;
    const int64_t all = search.rows * format_.groups(k_);
    for (int64_t g = 0; g < all; g += rows::kMostGroups) {
      const int64_t groups = std::min(rows::kMostGroups, all - g);
      float absmax[rows::kMostGroups];
      const float* values = search.x + g * width;
      kernels_.absmax(values, groups, width, absmax);
      choose({.x = values,
              .groups = groups,
              .width = width,
              .absmax = absmax,
              .importance = importance_of(search, g, groups, memory)},
             scales + g);
    }
  }

  Status encode_given(const GivenRows& given,
                      const Extent& /*extent*/,
                      std::span<std::byte* const> out,
                      RowsError& error) const override {
    return encode_rows(rows_of(given), out, error);
  }

 private:
  void choose(const rows::SearchArgs& args, float* powers) const {
    std::transform(args.absmax, args.absmax + args.groups, powers, even_power);
    if (rule_ != ScaleRule::kAbsMax) {
      kernels_.exponent(args, powers);
    }
  }

  Status encode_rows(const Rows& all, std::span<std::byte* const> out, RowsError& error) const {
    Tally tally;
    const int64_t width = format_.group_size;
    const int64_t groups_in_all = all.rows * format_.groups(k_);
    for (int64_t g = 0; g < groups_in_all; g += rows::kMostGroups) {
      const int64_t groups = std::min(rows::kMostGroups, groups_in_all - g);
      Encoded part = {.x = all.x + g * width, .groups = groups, .width = width};
      float absmax[rows::kMostGroups];
      float powers[rows::kMostGroups];
      NIBBLE_RETURN_IF_ERROR(find_absmax(all, part.x, groups, width, absmax));
      if (all.given == nullptr) {
        choose({.x = part.x, .groups = groups, .width = width, .absmax = absmax}, powers);
      } else {
        std::copy_n(all.given->scales + g, groups, powers);
        part.original = original_of(all, part);
      }
      part.absmax = absmax;
      part.scales = powers;
      encode_groups(kernels_.fp4, part, out[0] + g * width / 2, tally);
      for (int64_t i = 0; i < groups; ++i) {
        out[1][g + i] = static_cast<std::byte>(encode_e8m0(powers[i]));
      }
    }
    error = total(tally);
    return {};
  }
};

}  // namespace

EncoderPointer make_fp4_encoder(const EncoderOptions& options,
                                const rows::RowKernels& kernels,
                                int64_t n,
                                int64_t k) {
  return std::make_unique<Fp4Encoder>(options, kernels, n, k);
}

}  // namespace nibble
