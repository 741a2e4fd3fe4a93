#include <algorithm>
#include <cstring>

#include "quantizer/encoders/int_scales.h"
#include "quantizer/encoders/row_encoder.h"

namespace nibble {
namespace {

/// One scale per row, or one for all rows.
class Fp8RowEncoder final : public RowEncoder {
 public:
  using RowEncoder::RowEncoder;

  [[nodiscard]] bool needs_extent() const override {
    return format_.scale_per == ScalePer::kTensor;
  }

  Status encode(int64_t row,
                int64_t rows,
                const float* x,
                const Extent& extent,
                std::span<std::byte* const> out,
                RowsError& error) const override {
    Tally tally;
    for (int64_t i = 0; i < rows; ++i) {
      float absmax = 0;
      NIBBLE_RETURN_IF_ERROR(find_absmax({row, rows, x}, x + i * k_, 1, k_, &absmax));
      const float scale = fp8_scale(needs_extent() ? extent.absmax : absmax);
      encode_groups(
          kernels_.fp8,
          {.x = x + i * k_, .groups = 1, .width = k_, .absmax = &absmax, .scales = &scale},
          out[0] + i * k_, tally);
      if (!needs_extent() || row + i == 0) {
        store_scales(DType::kF32, &scale, 1, out[1] + i * 4);
      }
    }
    error = total(tally);
    return {};
  }
};

/// One scale per block of rows and columns; blocks at the edges use their own weights only.
class Fp8BlockEncoder final : public RowEncoder {
 public:
  using RowEncoder::RowEncoder;

  [[nodiscard]] int64_t row_block() const override { return format_.group_size; }

  Status encode(int64_t row,
                int64_t rows,
                const float* x,
                const Extent& /*extent*/,
                std::span<std::byte* const> out,
                RowsError& error) const override {
    Tally tally;
    const int64_t blocks = format_.groups(k_);
    std::vector<float> scales(static_cast<size_t>(blocks));
    for (int64_t b = 0; b < blocks; ++b) {
      float largest = 0;
      for (int64_t i = 0; i < rows; ++i) {
        float absmax = 0;
        NIBBLE_RETURN_IF_ERROR(
            find_absmax({row, rows, x}, x + i * k_ + b * format_.group_size, 1, width(b), &absmax));
        largest = std::max(largest, absmax);
      }
      scales[static_cast<size_t>(b)] = fp8_scale(largest);
    }
    store_scales(DType::kF32, scales.data(), blocks, out[1]);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t at = i * k_ + b * format_.group_size;
        float absmax = 0;
        kernels_.absmax(x + at, 1, width(b), &absmax);
        encode_groups(kernels_.fp8,
                      {.x = x + at,
                       .groups = 1,
                       .width = width(b),
                       .absmax = &absmax,
                       .scales = &scales[static_cast<size_t>(b)]},
                      out[0] + at, tally);
      }
    }
    error = total(tally);
    return {};
  }

 private:
  [[nodiscard]] int64_t width(int64_t block) const {
    return std::min<int64_t>(format_.group_size, k_ - block * format_.group_size);
  }
};

}  // namespace

EncoderPointer make_fp8_encoder(const EncoderOptions& options,
                                const rows::RowKernels& kernels,
                                int64_t n,
                                int64_t k) {
  if (options.scheme.weight.scale_per == ScalePer::kBlock) {
    return std::make_unique<Fp8BlockEncoder>(options, kernels, n, k);
  }
  return std::make_unique<Fp8RowEncoder>(options, kernels, n, k);
}

}  // namespace nibble
