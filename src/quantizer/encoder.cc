#include "quantizer/encoder.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/f16.h"
#include "checkpoint/finite.h"
#include "quant/levels.h"
#include "quantizer/encoders/row_encoder.h"
#include "quantizer/kernels/find_row_kernels.h"

namespace nibble {
namespace {

/// Whether the rule says how to choose scales of this scheme in this dialect.
bool rule_applies(ScaleRule rule, const EncoderOptions& options) {
  const WeightFormat& format = options.scheme.weight;
  if (rule == ScaleRule::kBest) {
    return true;
  }
  if (format.zero_points != ZeroPoints::kNone) {
    return rule == ScaleRule::kMinMax;
  }
  if (rule == ScaleRule::kQuark) {
    return options.dialect == Dialect::kQuark;
  }
  switch (format.code) {
    case WeightCode::kInt4:
    case WeightCode::kInt8:
      return rule != ScaleRule::kMinMax;
    case WeightCode::kFp8E4M3:
    case WeightCode::kFp4E2M1:
      return rule == ScaleRule::kAbsMax;
    default:
      return false;
  }
}

Status check_options(const EncoderOptions& options, int64_t k) {
  NIBBLE_RETURN_IF_ERROR(check_dialect(options.dialect, options.scheme));
  const WeightFormat& format = options.scheme.weight;
  if (format.scale_per == ScalePer::kGroup && k % format.group_size != 0) {
    return make_error(StatusCode::kUnsupported,
                      "{} input channels are no multiple of the group size {} of {}; leave the "
                      "module out with --ignore or choose another scheme",
                      k, format.group_size, options.scheme.name);
  }
  if (!rule_applies(options.rule, options)) {
    return make_error(StatusCode::kInvalidArgument,
                      "--scale-rule {} does not apply to scheme {} in format {}; leave it out",
                      scale_rule_name(options.rule), options.scheme.name,
                      dialect_name(options.dialect));
  }
  return {};
}

EncoderFactory* factory_of(const EncoderOptions& options) {
  const WeightFormat& format = options.scheme.weight;
  switch (format.code) {
    case WeightCode::kInt4:
    case WeightCode::kInt8:
      if (in_two_levels(format, options.scheme.act)) {
        return make_levels_encoder;
      }
      if (format.zero_points != ZeroPoints::kNone) {
        return make_zero_point_encoder;
      }
      return options.dialect == Dialect::kQuark ? make_progressive_encoder : make_int_encoder;
    case WeightCode::kFp8E4M3:
      return make_fp8_encoder;
    case WeightCode::kFp4E2M1:
      return make_fp4_encoder;
    case WeightCode::kBf16:
      return make_bf16_encoder;
    case WeightCode::kF32:
    case WeightCode::kF16:
      break;
  }
  return nullptr;
}

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

void MatrixEncoder::choose_scales(const ScaleSearch& /*search*/,
                                  float* /*scales*/,
                                  float* /*zeros*/) const {
  CHECK(takes_given_rows());
}

Status MatrixEncoder::encode_given(const GivenRows& /*given*/,
                                   const Extent& /*extent*/,
                                   std::span<std::byte* const> /*out*/,
                                   RowsError& /*error*/) const {
  CHECK(takes_given_rows());
  return {};
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
  NIBBLE_RETURN_IF_ERROR(check_options(options, k));
  NIBBLE_ASSIGN_OR_RETURN(const rows::RowKernels* kernels, rows::find_row_kernels(options.isa));
  EncoderFactory* const make = factory_of(options);
  if (make == nullptr) {
    return make_error(StatusCode::kUnsupported, "scheme {} is not a target; choose another",
                      options.scheme.name);
  }
  return make(options, *kernels, n, k);
}

Result<float> absmax_of(const float* x, int64_t row, int64_t rows, int64_t k) {
  NIBBLE_ASSIGN_OR_RETURN(const rows::RowKernels* kernels, rows::find_row_kernels("auto"));
  float largest = 0;
  kernels->absmax(x, 1, rows * k, &largest);
  if (std::isfinite(largest)) {
    return largest;
  }
  int64_t i = 0;
  while (std::isfinite(x[i])) {
    ++i;
  }
  return make_error(StatusCode::kCorrupt,
                    "weight [{}, {}] is {}; {} (--ignore would keep the tensor as it is, and what "
                    "it takes part in would be no number)",
                    row + i / k, i % k, x[i], kNotFiniteRemedy);
}

std::optional<float> absmax_of_bf16(std::span<const std::byte> numbers) {
  const auto kernels = rows::find_row_kernels("auto");
  CHECK(kernels.ok());
  const float largest = bf16_to_f32((*kernels)->absmax_bf16(
      reinterpret_cast<const uint8_t*>(numbers.data()), static_cast<int64_t>(numbers.size() / 2)));
  return std::isfinite(largest) ? std::optional(largest) : std::nullopt;
}

}  // namespace nibble
