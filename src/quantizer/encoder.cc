#include "quantizer/encoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/f16.h"
#include "quant/codec.h"
#include "quant/fake_quant.h"

namespace nibble {
namespace {

Status check_finite(const float* x, int64_t row, int64_t rows, int64_t k) {
  for (int64_t i = 0; i < rows * k; ++i) {
    if (!std::isfinite(x[i])) {
      return make_error(StatusCode::kCorrupt,
                        "weight [{}, {}] is {}; leave the module out with --ignore", row + i / k,
                        i % k, x[i]);
    }
  }
  return {};
}

/// Codes and scales of one row each, and a shape that belongs to no row.
class RowEncoder final : public MatrixEncoder {
 public:
  RowEncoder(const EncoderOptions& options, int64_t n, int64_t k)
      : format_(options.scheme.weight), rule_(options.rule), n_(n), k_(k) {
    slots_ = linear_slots(options.scheme, n, k);
  }

  [[nodiscard]] bool needs_extent() const override { return false; }
  [[nodiscard]] int64_t row_block() const override { return 8; }

  [[nodiscard]] Place place(size_t slot, int64_t row, int64_t rows) const override {
    if (slot == 2) {
      return {0, row == 0 ? 16 : 0};
    }
    const int64_t bytes = slot == 0 ? QuantTensor::code_row_bytes(format_.code, k_)
                                    : format_.groups(k_) * dtype_bits(format_.scale_dtype) / 8;
    return {row * bytes, rows * bytes};
  }

  Status encode(int64_t row,
                int64_t rows,
                const float* x,
                const Extent& /*extent*/,
                std::span<std::byte* const> out,
                RowsError& error) const override {
    NIBBLE_RETURN_IF_ERROR(check_finite(x, row, rows, k_));
    error = {};
    std::vector<float> scales(static_cast<size_t>(format_.groups(k_)));
    std::vector<float> decoded(static_cast<size_t>(k_));
    for (int64_t i = 0; i < rows; ++i) {
      const float* values = x + i * k_;
      quantize_row(format_, rule_, {values, static_cast<size_t>(k_)}, scales.data(),
                   out[0] + place(0, i, 1).offset);
      fake_quant_row(format_, values, k_, {scales.data()}, decoded.data());
      error.add(row_error(values, decoded.data(), scales));
      if (out.size() > 1) {
        store_scales(scales, out[1] + place(1, i, 1).offset);
      }
    }
    if (out.size() > 2 && row == 0) {
      const int64_t shape[2] = {n_, k_};
      std::memcpy(out[2], shape, sizeof(shape));
    }
    return {};
  }

 private:
  [[nodiscard]] RowsError row_error(const float* x,
                                    const float* decoded,
                                    const std::vector<float>& scales) const {
    RowsError error;
    error.count = k_;
    for (int64_t i = 0; i < k_; ++i) {
      const double from = x[i];
      const double to = decoded[i];
      error.signal += from * from;
      error.noise += (from - to) * (from - to);
      error.product += from * to;
      error.energy += to * to;
      error.max_error = std::max(error.max_error, std::fabs(x[i] - decoded[i]));
      error.zeros += x[i] != 0 && decoded[i] == 0 ? 1 : 0;
    }
    for (size_t i = 0; i < scales.size(); ++i) {
      const float size = std::fabs(scales[i]);
      error.scale_low = i == 0 ? size : std::min(error.scale_low, size);
      error.scale_high = std::max(error.scale_high, size);
    }
    return error;
  }

  void store_scales(const std::vector<float>& scales, std::byte* out) const {
    for (size_t i = 0; i < scales.size(); ++i) {
      if (format_.scale_dtype == DType::kBF16) {
        const uint16_t bits = f32_to_bf16(scales[i]);
        std::memcpy(out + i * 2, &bits, 2);
      } else {
        std::memcpy(out + i * 4, &scales[i], 4);
      }
    }
  }

  WeightFormat format_;
  ScaleRule rule_;
  int64_t n_;
  int64_t k_;
};

}  // namespace

void RowsError::add(const RowsError& next) {
  if (next.count == 0) {
    return;
  }
  scale_low = count == 0 ? next.scale_low : std::min(scale_low, next.scale_low);
  scale_high = std::max(scale_high, next.scale_high);
  count += next.count;
  signal += next.signal;
  noise += next.noise;
  product += next.product;
  energy += next.energy;
  max_error = std::max(max_error, next.max_error);
  clipped += next.clipped;
  zeros += next.zeros;
}

double RowsError::snr_db() const { return QuantError{.signal = signal, .noise = noise}.snr_db(); }

double RowsError::cosine() const {
  const double length = std::sqrt(signal) * std::sqrt(energy);
  if (length > 0) {
    return product / length;
  }
  return signal == energy ? 1 : 0;  // nothing was lost of nothing
}

Result<std::unique_ptr<MatrixEncoder>> make_encoder(const EncoderOptions& options,
                                                    int64_t n,
                                                    int64_t k) {
  CHECK_GT(n, 0);
  CHECK_GT(k, 0);
  NIBBLE_RETURN_IF_ERROR(check_dialect(options.dialect, options.scheme));
  const WeightFormat& format = options.scheme.weight;
  if (format.scale_per == ScalePer::kGroup && k % format.group_size != 0) {
    return make_error(StatusCode::kUnsupported,
                      "{} input channels are no multiple of the group size {} of {}; leave the "
                      "module out with --ignore or choose another scheme",
                      k, format.group_size, options.scheme.name);
  }
  const bool shared = format.scale_per == ScalePer::kTensor || format.scale_per == ScalePer::kBlock;
  if (shared || format.zero_points != ZeroPoints::kNone || format.code == WeightCode::kFp4E2M1) {
    return make_error(StatusCode::kUnsupported, "scheme {}: no encoder", options.scheme.name);
  }
  return std::unique_ptr<MatrixEncoder>(std::make_unique<RowEncoder>(options, n, k));
}

Result<float> absmax_of(const float* x, int64_t row, int64_t rows, int64_t k) {
  NIBBLE_RETURN_IF_ERROR(check_finite(x, row, rows, k));
  float largest = 0;
  for (int64_t i = 0; i < rows * k; ++i) {
    largest = std::max(largest, std::fabs(x[i]));
  }
  return largest;
}

}  // namespace nibble
