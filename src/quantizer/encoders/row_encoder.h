#pragma once

#include <memory>
#include <vector>

#include "quantizer/encoder.h"
#include "quantizer/kernels/row_kernels.h"

namespace nibble {

/// What all encoders share: formats, kernels, and how sums of kernels become a RowsError.
class RowEncoder : public MatrixEncoder {
 public:
  RowEncoder(const EncoderOptions& options, const rows::RowKernels& kernels, int64_t n, int64_t k);

  [[nodiscard]] bool needs_extent() const override { return false; }
  [[nodiscard]] int64_t row_block() const override { return 8; }
  [[nodiscard]] Place place(size_t slot, int64_t row, int64_t rows) const override;

 protected:
  /// Rows that are being encoded, [rows, k].
  struct Rows {
    int64_t row = 0;
    int64_t rows = 0;
    const float* x = nullptr;
    const GivenRows* given = nullptr;  // whose values are x
  };
  /// Neighbouring weights and what became of them.
  struct Encoded {
    const float* x = nullptr;  // [groups, width]
    int64_t groups = 0;
    int64_t width = 0;
    const float* absmax = nullptr;    // [groups]
    const float* scales = nullptr;    // [groups]; nullptr when the format has none
    const float* zeros = nullptr;     // [groups] or nullptr
    const float* original = nullptr;  // [groups, width]: what given values x were made of
  };
  [[nodiscard]] static Rows rows_of(const GivenRows& given) {
    return {given.row, given.rows, given.values, &given};
  }
  /// What part [groups, width], from group `first` of the rows on, was made of; null: x is that.
  [[nodiscard]] static const float* original_of(const Rows& all, const Encoded& part) {
    return all.given == nullptr ? nullptr : all.given->x + (part.x - all.x);
  }
  /// The importance of the weights of `groups` groups from group `first` of some rows on, one after
  /// the other as they lie; null for none.
  const float* importance_of(const ScaleSearch& search,
                             int64_t first,
                             int64_t groups,
                             std::vector<float>& memory) const;

  /// Largest magnitudes of `groups` neighbouring runs of `width` weights from x on, which lie in
  /// `all`. kCorrupt, naming the place, when one is not finite.
  Status find_absmax(
      const Rows& all, const float* x, int64_t groups, int64_t width, float* absmax) const;
  /// Whether single-precision sums of the squares of these weights can overflow or vanish.
  [[nodiscard]] static bool extreme(const Encoded& encoded);
  /// What was lost so far: the sums of kernels, and all else.
  struct Tally {
    rows::Sums sums;
    RowsError rest;
  };
  /// Encodes with `encode` and adds up what was lost; of extreme weights in double precision, from
  /// what fake_quant_row() makes of them.
  void encode_groups(rows::RowKernels::Encode encode,
                     const Encoded& encoded,
                     std::byte* codes,
                     Tally& tally) const;
  /// Adds up what was lost of given values.
  void add_given(const Encoded& encoded, Tally& tally) const;
  /// Notes count and scales of weights whose sums are elsewhere.
  static void note(const Encoded& encoded, Tally& tally);
  [[nodiscard]] static RowsError total(const Tally& tally);
  void write_shape(int64_t row, std::byte* out) const;
  [[nodiscard]] int64_t code_row_bytes() const {
    return QuantTensor::code_row_bytes(format_.code, k_);
  }

  WeightFormat format_;
  ScaleRule rule_;
  const rows::RowKernels& kernels_;
  int64_t n_;
  int64_t k_;
};

/// Adds sums of single rows given their decoded values, in double precision.
void add_decoded(const float* x, const float* decoded, int64_t count, RowsError& error);
/// Stores scales as BF16 or F32.
void store_scales(DType dtype, const float* scales, int64_t count, std::byte* out);

/// The encoders; arguments are checked by make_encoder().
using EncoderPointer = std::unique_ptr<MatrixEncoder>;
using EncoderFactory = EncoderPointer(const EncoderOptions& options,
                                      const rows::RowKernels& kernels,
                                      int64_t n,
                                      int64_t k);
EncoderFactory make_int_encoder;
EncoderFactory make_zero_point_encoder;
EncoderFactory make_levels_encoder;
EncoderFactory make_progressive_encoder;
EncoderFactory make_fp8_encoder;
EncoderFactory make_fp4_encoder;
EncoderFactory make_bf16_encoder;

}  // namespace nibble
