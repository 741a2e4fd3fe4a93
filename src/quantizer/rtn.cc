#include "quantizer/rtn.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace nibble {
namespace {

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

std::span<const ScaleRule> all_scale_rules() {
  using enum ScaleRule;
  static constexpr ScaleRule kAll[] = {kAbsMax, kAbsMaxHalf, kSigned, kLsq, kLsqSigned,
                                       kMse,    kMinMax,     kQuark,  kBest};
  return kAll;
}

double QuantError::snr_db() const {
  constexpr double kMostDb = 200;
  if (noise <= 0) {
    return kMostDb;
  }
  return signal <= 0 ? -kMostDb : std::min(kMostDb, 10 * std::log10(signal / noise));
}

}  // namespace nibble
