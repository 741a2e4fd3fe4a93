#include "quantizer/rtn.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "base/f16.h"
#include "quant/codec.h"
#include "quant/fake_quant.h"

namespace nibble {
namespace {

constexpr size_t kLanes = 8;  // independent sums, so that the loops vectorise
// The scale of a group of zeros: what compressed-tensors stores.
constexpr float kZeroScaleF32 = 0x1p-23F;
constexpr float kZeroScaleBf16 = 0x1p-7F;

constexpr std::array<std::pair<std::string_view, ScaleRule>, 10> kRuleNames = {{
    {"best", ScaleRule::kBest},
    {"absmax", ScaleRule::kAbsMax},
    {"absmax7", ScaleRule::kAbsMax},
    {"absmax7.5", ScaleRule::kAbsMaxHalf},
    {"signed", ScaleRule::kSigned},
    {"lsq", ScaleRule::kLsq},
    {"lsq_signed", ScaleRule::kLsqSigned},
    {"mse", ScaleRule::kMse},
    {"minmax", ScaleRule::kMinMax},
    {"quark", ScaleRule::kQuark},
}};

float largest_code(WeightCode code) {
  return code == WeightCode::kFp8E4M3 ? kE4M3Max : code_range(code).high;
}

/// The code vector that an inverse scale gives, seen by least squares: the best scale for these
/// codes is sum(x * code) / sum(code^2), and it removes sum(x * code)^2 / sum(code^2) from the
/// error. Products are of x * inverse, so that no weight is too large or small to be squared.
struct Fit {
  float dot = 0;     // sum of x * inverse * code
  float square = 0;  // sum of code^2
};

Fit fit_codes(std::span<const float> x, float inverse, CodeRange range) {
  std::array<float, kLanes> dot{};
  std::array<float, kLanes> square{};
  const auto add = [&](size_t lane, float value) {
    const float scaled = value * inverse;
    const float code = round_half_even(std::min(std::max(scaled, range.low), range.high));
    dot[lane] += scaled * code;
    square[lane] += code * code;
  };
  size_t i = 0;
  for (; i + kLanes <= x.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      add(lane, x[i + lane]);
    }
  }
  for (size_t lane = 0; i < x.size(); ++i, ++lane) {
    add(lane, x[i]);
  }
  Fit fit;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    fit.dot += dot[lane];
    fit.square += square[lane];
  }
  return fit;
}

class Search final {
 public:
  Search(std::span<const float> x, float absmax, CodeRange range)
      : x_(x), absmax_(absmax), range_(range) {}

  /// Tries the inverse scale steps / absmax; true when it is the best so far.
  bool attempt(float steps) {
    const float inverse = steps / absmax_;
    const Fit fit = fit_codes(x_, inverse, range_);
    const float gain = fit.square > 0 ? fit.dot * fit.dot / (fit.square * steps * steps) : 0;
    if (gain <= best_gain_) {
      return false;
    }
    best_gain_ = gain;
    scale_ = fit.dot / fit.square / inverse;
    return true;
  }
  [[nodiscard]] float scale() const { return scale_; }

 private:
  std::span<const float> x_;
  float absmax_;
  CodeRange range_;
  float best_gain_ = 0;
  float scale_ = 0;
};

// llama.cpp's make_qx_quants moves the inverse scale around -8 / m; here it moves around
// 7.5 / absmax, which reaches both 8 / |m| and 7 / |m| and keeps the scale positive.
float lsq_scale(std::span<const float> x, float absmax, CodeRange range, ScaleRule rule) {
  Search search(x, absmax, range);
  const float middle = range.high + 0.5F;
  for (int i = -9; i <= 9; ++i) {
    const float steps = middle + 0.15F * static_cast<float>(i);
    search.attempt(steps);
    if (rule == ScaleRule::kLsqSigned) {
      search.attempt(-steps);
    }
  }
  return search.scale();
}

float mse_scale(std::span<const float> x, float absmax, CodeRange range) {
  Search search(x, absmax, range);
  const float middle = range.high + 0.5F;
  int best = 100;
  const auto attempt = [&](int percent) {
    return search.attempt(middle * 100.0F / static_cast<float>(percent));
  };
  for (int percent = 100; percent >= 28; percent -= 4) {
    best = attempt(percent) ? percent : best;
  }
  for (const int step : {-3, -2, -1, 1, 2, 3}) {
    attempt(std::min(best + step, 100));
  }
  return search.scale();
}

ScaleRule resolve(ScaleRule rule, const WeightFormat& format) {
  const bool int4 = format.code == WeightCode::kInt4;
  const bool fp8 = format.code == WeightCode::kFp8E4M3;
  if (rule == ScaleRule::kBest) {
    if (!int4) {
      return ScaleRule::kAbsMax;
    }
    return format.scale_per == ScalePer::kGroup ? ScaleRule::kLsqSigned : ScaleRule::kMse;
  }
  return fp8 ? ScaleRule::kAbsMax : rule;  // a float format has no unused code to win
}

float ideal_scale(std::span<const float> x,
                  float absmax,
                  const WeightFormat& format,
                  ScaleRule rule) {
  const float top = largest_code(format.code);
  const CodeRange range = code_range(format.code);
  switch (resolve(rule, format)) {
    case ScaleRule::kBest:
    case ScaleRule::kMinMax:
    case ScaleRule::kQuark:
    case ScaleRule::kAbsMax:
      return absmax / top;
    case ScaleRule::kAbsMaxHalf:
      return absmax / (top + 0.5F);
    case ScaleRule::kSigned: {
      const bool negative = std::find(x.begin(), x.end(), -absmax) != x.end();
      return negative ? absmax / -range.low : absmax / range.low;
    }
    case ScaleRule::kLsq:
    case ScaleRule::kLsqSigned:
      return lsq_scale(x, absmax, range, resolve(rule, format));
    case ScaleRule::kMse:
      return mse_scale(x, absmax, range);
  }
  return absmax / top;
}

float group_scale(std::span<const float> x, const WeightFormat& format, ScaleRule rule) {
  float absmax = 0;
  for (const float value : x) {
    absmax = std::max(absmax, std::fabs(value));
  }
  const bool bf16 = format.scale_dtype == DType::kBF16;
  // Below this the quotients overflow and the scale would round to zero.
  if (absmax < 1e3F * std::numeric_limits<float>::min()) {
    return bf16 ? kZeroScaleBf16 : kZeroScaleF32;
  }
  const float scale = ideal_scale(x, absmax, format, rule);
  return bf16 ? bf16_to_f32(f32_to_bf16(scale)) : scale;
}

}  // namespace

Result<ScaleRule> parse_scale_rule(std::string_view name) {
  std::string known;
  for (const auto& [text, rule] : kRuleNames) {
    if (text == name) {
      return rule;
    }
    known += known.empty() ? "" : ", ";
    known += text;
  }
  return make_error(StatusCode::kInvalidArgument, "unknown scale rule \"{}\"; choose one of {}",
                    name, known);
}

std::string_view scale_rule_name(ScaleRule rule) {
  for (const auto& [text, value] : kRuleNames) {
    if (value == rule) {
      return text;
    }
  }
  return {};
}

double QuantError::snr_db() const {
  constexpr double kMostDb = 200;
  if (noise <= 0) {
    return kMostDb;
  }
  return signal <= 0 ? -kMostDb : std::min(kMostDb, 10 * std::log10(signal / noise));
}

QuantError quantize_row(const WeightFormat& format,
                        ScaleRule rule,
                        std::span<const float> x,
                        float* scales,
                        std::byte* codes) {
  const auto k = static_cast<int64_t>(x.size());
  const int64_t groups = format.groups(k);
  const size_t width = x.size() / static_cast<size_t>(std::max<int64_t>(groups, 1));
  for (int64_t g = 0; g < groups; ++g) {
    scales[g] = group_scale(x.subspan(static_cast<size_t>(g) * width, width), format, rule);
  }
  encode_row(format, x.data(), k, {scales}, codes);
  std::vector<float> decoded(x.size());
  fake_quant_row(format, x.data(), k, {scales}, decoded.data());
  QuantError error;
  for (size_t i = 0; i < x.size(); ++i) {
    const double difference = static_cast<double>(x[i]) - static_cast<double>(decoded[i]);
    error.signal += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    error.noise += difference * difference;
  }
  return error;
}

}  // namespace nibble
