#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/f16.h"
#include "ops/gemm.h"
#include "quant/block_rounding.h"

namespace nibble {
namespace {

constexpr float kFp8Max = 448.0F;
constexpr size_t kFp8Group = 128;

double decode_e4m3(uint8_t code) {
  const int exponent = (code >> 3) & 15;
  const int mantissa = code & 7;
  const double sign = (code & 0x80) != 0 ? -1.0 : 1.0;
  if (exponent == 15 && mantissa == 7) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10));
}

double decode_e2m1(int code) {
  constexpr double kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kValues[code & 7] : kValues[code & 7];
}

double code_value(const QuantTensor& weight, int64_t row, int64_t column) {
  const auto* bytes =
      reinterpret_cast<const uint8_t*>(weight.codes.data()) + row * weight.row_bytes();
  const auto half = [&] {
    return static_cast<uint16_t>(bytes[2 * column] | (bytes[2 * column + 1] << 8));
  };
  switch (weight.format.code) {
    case WeightCode::kF32:
      return reinterpret_cast<const float*>(bytes)[column];
    case WeightCode::kF16:
      return f16_to_f32(half());
    case WeightCode::kBf16:
      return bf16_to_f32(half());
    case WeightCode::kInt8:
      return static_cast<int8_t>(bytes[column]);
    case WeightCode::kFp8E4M3:
      return decode_e4m3(bytes[column]);
    case WeightCode::kInt4:
      return ((bytes[column / 2] >> (column % 2 * 4)) & 15) - 8;
    case WeightCode::kFp4E2M1:
      return decode_e2m1(bytes[column / 2] >> (column % 2 * 4));
  }
  return 0.0;
}

double weight_value(const QuantTensor& weight, int64_t row, int64_t column) {
  double code = code_value(weight, row, column);
  const int64_t groups = weight.format.groups(weight.k);
  if (groups == 0) {
    return code;
  }
  const int64_t group = weight.format.grouped() ? column / weight.format.group_size : 0;
  const auto index = static_cast<size_t>(row * groups + group);
  const double scale = weight.scales.as<float>()[index];
  switch (weight.format.zero_points) {
    case ZeroPoints::kNone:
      break;
    case ZeroPoints::kPerScale:
      code -= weight.zeros.as<int8_t>()[index];
      break;
    case ZeroPoints::kMinimum:
      return (code + 8) * scale + weight.minimums.as<float>()[index];  // of int4
  }
  return code * scale;
}

/// The E4M3 value nearest to `value`, found by search; ties go to the even code.
double nearest_e4m3(double value) {
  double best = 0.0;
  double distance = std::numeric_limits<double>::infinity();
  for (int code = 0; code < 0x7f; ++code) {
    const double candidate = decode_e4m3(static_cast<uint8_t>(code));
    const double gap = std::fabs(candidate - std::fabs(value));
    if (gap < distance || (gap == distance && code % 2 == 0)) {
      best = candidate;
      distance = gap;
    }
  }
  return std::copysign(best, value);
}

/// Activations x [row.size()] that share a scale, as the product sees them.
void round_together(const ActSpec& spec, const float* x, std::span<double> row) {
  const ActFormat act = spec.format;
  float absmax = 0.0F;
  bool finite = true;
  for (size_t i = 0; i < row.size(); ++i) {
    row[i] = x[i];
    finite = finite && std::isfinite(x[i]);
    absmax = std::fmax(absmax, std::fabs(x[i]));
  }
  if (act == ActFormat::kFloat) {
    return;
  }
  if (act == ActFormat::kBf16) {
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = bf16_to_f32(f32_to_bf16(x[i]));
    }
    return;
  }
  if (!finite) {
    std::ranges::fill(row, std::numeric_limits<double>::quiet_NaN());
    return;
  }
  const float top = act == ActFormat::kInt8Token ? 127.0F : kFp8Max;
  absmax = spec.static_scale > 0.0F ? spec.static_scale * top : absmax;
  const float scale = absmax / top;
  const float factor = std::isfinite(top / absmax) ? top / absmax : 0.0F;
  for (size_t i = 0; i < row.size(); ++i) {
    const float scaled = std::clamp(x[i], -absmax, absmax) * factor;  // in f32, as kernels do
    const double code =
        act == ActFormat::kInt8Token ? std::nearbyint(scaled) : nearest_e4m3(scaled);
    row[i] = code * scale;
  }
}

/// One row of activations as the product sees it.
void round_activations(const ActSpec& spec, const float* x, std::span<double> row) {
  std::vector<float> ordered(x, x + row.size());
  for (size_t i = 0; spec.columns != nullptr && i < row.size(); ++i) {
    ordered[i] = x[(*spec.columns)[i]];
  }
  const size_t together = spec.format == ActFormat::kFp8Group ? kFp8Group : row.size();
  for (size_t begin = 0; begin < row.size(); begin += together) {
    const size_t count = std::min(together, row.size() - begin);
    round_together(spec, ordered.data() + begin, row.subspan(begin, count));
  }
}

/// A row in blocks, and the exact sums of its products with a row of weights.
class BlockRow {
 public:
  BlockRow(const QuantTensor& weight, const ActSpec& spec, const float* x)
      : blocks_(*spec.blocks),
        form_(block_scales_of(weight.format, spec.format)),
        codes_(static_cast<size_t>(weight.k)),
        scales_(static_cast<size_t>(scale_count(blocks_, form_))) {
    std::vector<float> ordered(x, x + weight.k);
    for (size_t i = 0; spec.columns != nullptr && i < ordered.size(); ++i) {
      ordered[i] = x[(*spec.columns)[i]];
    }
    if (form_ == BlockScales::kWide) {
      round_wide_blocks(blocks_, ordered.data(), {codes_.data(), scales_.data()});
      return;
    }
    std::vector<int8_t> codes(codes_.size());
    round_blocks(blocks_, form_, ordered.data(), {codes.data(), scales_.data()});
    std::ranges::copy(codes, codes_.begin());
  }

  /// In F32, one operation after the other, as every device does it.
  [[nodiscard]] float times(const QuantTensor& weight, int64_t n) const {
    const auto scales =
        weight.scales.as<float>().subspan(static_cast<size_t>(n * weight.format.groups(weight.k)));
    if (form_ == BlockScales::kWide) {
      return scales[0] * of_wide_blocks(weight, n);
    }
    float result = 0.0F;
    int64_t all = 0;
    for (size_t b = 0; b < blocks_.bits.size(); ++b) {
      const int64_t sum = sum_of(weight, n, b);
      all += sum;
      if (form_ == BlockScales::kEach) {
        result = std::fma(static_cast<float>(sum), scales_[b] * scales[b], result);
      }
    }
    return form_ == BlockScales::kEach ? result
                                       : static_cast<float>(all) * (scales[0] * scales_[0]);
  }

 private:
  /// The blocks of 16 bits, one after the other, then the sum of those of 8.
  [[nodiscard]] float of_wide_blocks(const QuantTensor& weight, int64_t n) const {
    float result = 0.0F;
    int64_t narrow = 0;
    size_t scale = 1;
    for (size_t b = 0; b < blocks_.bits.size(); ++b) {
      const int64_t sum = sum_of(weight, n, b);
      if (blocks_.bits[b] == 16) {
        result = std::fma(static_cast<float>(sum), scales_[scale++], result);
      } else {
        narrow += sum;
      }
    }
    return std::fma(static_cast<float>(narrow), scales_[0], result);
  }

  [[nodiscard]] int64_t sum_of(const QuantTensor& weight, int64_t n, size_t block) const {
    const auto first = static_cast<int64_t>(block) * blocks_.block;
    int64_t sum = 0;
    for (int64_t k = first; k < first + blocks_.block; ++k) {
      sum += codes_[static_cast<size_t>(k)] * static_cast<int64_t>(code_value(weight, n, k));
    }
    return sum;
  }

  const BlockPrecision& blocks_;
  BlockScales form_;
  std::vector<int16_t> codes_;
  std::vector<float> scales_;
};

/// To the bit of what devices compute: all of a product but its integer sums is rounded.
void reference_blocks(const QuantTensor& weight, const ActSpec& act, const GemmArgs& args) {
  for (int64_t m = 0; m < args.m; ++m) {
    const BlockRow row(weight, act, args.x.f32() + m * args.x_stride);
    for (int64_t n = 0; n < weight.n; ++n) {
      float& y = args.y.f32()[m * args.y_stride + n];
      const float value = row.times(weight, n) + (args.bias != nullptr ? args.bias[n] : 0.0F);
      y = args.output == GemmOutput::kAdd ? y + value : value;
    }
  }
}

}  // namespace

void reference_gemm(const QuantTensor& weight, const ActSpec& act, const GemmArgs& args) {
  CHECK_GE(args.x_stride, weight.k);
  CHECK_GE(args.y_stride, weight.n);
  if (in_blocks(act.format)) {
    return reference_blocks(weight, act, args);
  }
  std::vector<double> matrix(static_cast<size_t>(weight.n * weight.k));
  for (int64_t n = 0; n < weight.n; ++n) {
    for (int64_t k = 0; k < weight.k; ++k) {
      matrix[static_cast<size_t>(n * weight.k + k)] = weight_value(weight, n, k);
    }
  }
  std::vector<double> row(static_cast<size_t>(weight.k));
  for (int64_t m = 0; m < args.m; ++m) {
    round_activations(act, args.x.f32() + m * args.x_stride, row);
    for (int64_t n = 0; n < weight.n; ++n) {
      double sum = 0.0;
      for (size_t k = 0; k < row.size(); ++k) {
        sum += row[k] * matrix[static_cast<size_t>(n) * row.size() + k];
      }
      float& y = args.y.f32()[m * args.y_stride + n];
      sum += args.bias != nullptr ? args.bias[n] : 0.0F;
      y = static_cast<float>(args.output == GemmOutput::kAdd ? y + sum : sum);
    }
  }
}

}  // namespace nibble
