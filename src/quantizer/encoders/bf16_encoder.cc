#include "quantizer/encoders/row_encoder.h"

namespace nibble {
namespace {

/// Plain BF16.
class Bf16Encoder final : public RowEncoder {
 public:
  using RowEncoder::RowEncoder;

  Status encode(int64_t row,
                int64_t rows,
                const float* x,
                const Extent& /*extent*/,
                std::span<std::byte* const> out,
                RowsError& error) const override {
    constexpr float kBeyond = 0x1.ffp127F;  // rounds to infinity
    Tally tally;
    for (int64_t i = 0; i < rows; ++i) {
      float absmax = 0;
      NIBBLE_RETURN_IF_ERROR(find_absmax({row, rows, x}, x + i * k_, 1, k_, &absmax));
      if (absmax >= kBeyond) {
        return make_error(StatusCode::kCorrupt,
                          "row {} holds a weight of {}, which BF16 cannot; leave the module out "
                          "with --ignore",
                          row + i, absmax);
      }
      encode_groups(kernels_.bf16, {.x = x + i * k_, .groups = 1, .width = k_, .absmax = &absmax},
                    out[0] + i * k_ * 2, tally);
    }
    error = total(tally);
    return {};
  }
};

}  // namespace

EncoderPointer make_bf16_encoder(const EncoderOptions& options,
                                 const rows::RowKernels& kernels,
                                 int64_t n,
                                 int64_t k) {
  return std::make_unique<Bf16Encoder>(options, kernels, n, k);
}

}  // namespace nibble
