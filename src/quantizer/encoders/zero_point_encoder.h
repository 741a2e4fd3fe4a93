#pragma once

#include "quantizer/encoders/row_encoder.h"

namespace nibble {

/// INT4 in groups with zero points.
class ZeroPointEncoder : public RowEncoder {
 public:
  using RowEncoder::RowEncoder;

  Status encode(int64_t row,
                int64_t rows,
                const float* x,
                const Extent& extent,
                std::span<std::byte* const> out,
                RowsError& error) const override;
  [[nodiscard]] bool takes_given_rows() const override { return true; }
  void choose_scales(const ScaleSearch& search, float* scales, float* zeros) const override;
  Status encode_given(const GivenRows& given,
                      const Extent& extent,
                      std::span<std::byte* const> out,
                      RowsError& error) const override;

 protected:
  /// What part of a group's weights its codes are to span; 0 lies within.
  struct Range {
    float low = 0;
    float high = 0;
  };
  /// Those of `groups` groups, at most kMostGroups, from group `first` of the rows on.
  void choose_ranges(const ScaleSearch& search, int64_t first, int64_t groups, Range* ranges) const;

 private:
  /// What decodes each group of some rows.
  struct Numbers {
    const float* scales = nullptr;
    const float* zeros = nullptr;
  };
  Status encode_rows(const Rows& all,
                     const Numbers& numbers,
                     std::span<std::byte* const> out,
                     RowsError& error) const;
  void store_zero(int64_t index, int zero, std::byte* words) const;
};

}  // namespace nibble
