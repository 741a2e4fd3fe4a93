#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/f16.h"
#include "ops/gemm.h"

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

}  // namespace

void reference_gemm(const QuantTensor& weight, const ActSpec& act, const GemmArgs& args) {
  CHECK_GE(args.x_stride, weight.k);
  CHECK_GE(args.y_stride, weight.n);
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
