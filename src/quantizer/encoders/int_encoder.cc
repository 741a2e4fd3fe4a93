#include <algorithm>

#include "checkpoint/linear_slots.h"
#include "quant/codec.h"
#include "quantizer/encoders/int_scales.h"
#include "quantizer/encoders/row_encoder.h"

namespace nibble {
namespace {

/// INT4 and INT8 without zero points, one scale per group or channel.
class IntEncoder final : public RowEncoder {
 public:
  IntEncoder(const EncoderOptions& options, const rows::RowKernels& kernels, int64_t n, int64_t k)
      : RowEncoder(options, kernels, n, k), in_words_(stores_int8_in_words(options.scheme)) {}

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
    const int64_t all = search.rows * format_.groups(k_);
    const int64_t width = k_ / format_.groups(k_);
    for (int64_t g = 0; g < all; g += step()) {
      const int64_t groups = std::min(step(), all - g);
      float absmax[rows::kMostGroups];
      const Encoded part = {.x = search.x + g * width, .groups = groups, .width = width};
      kernels_.absmax(part.x, groups, width, absmax);
      choose(part, absmax, importance_of(search, g, groups, memory), scales + g);
    }
  }

  Status encode_given(const GivenRows& given,
                      const Extent& /*extent*/,
                      std::span<std::byte* const> out,
                      RowsError& error) const override {
    return encode_rows(rows_of(given), out, error);
  }

 private:
  /// Groups at once: rows of groups follow each other without a gap; rows of channels end on whole
  /// words.
  [[nodiscard]] int64_t step() const { return format_.grouped() ? rows::kMostGroups : 1; }

  Status encode_rows(const Rows& all, std::span<std::byte* const> out, RowsError& error) const {
    Tally tally;
    const int64_t per_row = format_.groups(k_);
    const int64_t width = k_ / per_row;
    const int64_t stored_row = place(0, 0, 1).bytes;
    for (int64_t g = 0; g < all.rows * per_row; g += step()) {
      const int64_t groups = std::min(step(), all.rows * per_row - g);
      std::byte* codes = out[0] + (format_.grouped() ? code_bytes(g * width) : g * stored_row);
      NIBBLE_RETURN_IF_ERROR(encode_part(all,
                                         {.x = all.x + g * width, .groups = groups, .width = width},
                                         codes, out[1] + g * scale_bytes(), tally));
      if (in_words_) {
        std::transform(codes, codes + k_, codes, [](std::byte b) { return b ^ kInt8WordOffset; });
        std::fill(codes + k_, codes + stored_row, std::byte{0});
      }
    }
    if (out.size() > 2) {
      write_shape(all.row, out[2]);
    }
    error = total(tally);
    return {};
  }

  void choose(const Encoded& part,
              const float* absmax,
              const float* importance,
              float* scales) const {
    const CodeRange range = code_range(format_.code);
    int_scales(kernels_, format_, resolve_rule(rule_, format_),
               {.x = part.x,
                .groups = part.groups,
                .width = part.width,
                .absmax = absmax,
                .importance = importance,
                .low = range.low,
                .high = range.high},
               scales);
  }

  [[nodiscard]] int64_t code_bytes(int64_t count) const {
    return format_.code == WeightCode::kInt4 ? count / 2 : count;
  }
  [[nodiscard]] int64_t scale_bytes() const { return dtype_bits(format_.scale_dtype) / 8; }

  Status encode_part(
      const Rows& all, Encoded part, std::byte* codes, std::byte* scales_out, Tally& tally) const {
    float absmax[rows::kMostGroups];
    float scales[rows::kMostGroups];
    NIBBLE_RETURN_IF_ERROR(find_absmax(all, part.x, part.groups, part.width, absmax));
    if (all.given == nullptr) {
      choose(part, absmax, nullptr, scales);
    } else {
      std::copy_n(all.given->scales + (part.x - all.x) / part.width, part.groups, scales);
      part.original = original_of(all, part);
    }
    part.absmax = absmax;
    part.scales = scales;
    encode_groups(format_.code == WeightCode::kInt4 ? kernels_.int4 : kernels_.int8, part, codes,
                  tally);
    store_scales(format_.scale_dtype, scales, part.groups, scales_out);
    return {};
  }

  bool in_words_;  // INT8 of which rows are channels
};

}  // namespace

EncoderPointer make_int_encoder(const EncoderOptions& options,
                                const rows::RowKernels& kernels,
                                int64_t n,
                                int64_t k) {
  return std::make_unique<IntEncoder>(options, kernels, n, k);
}

}  // namespace nibble
