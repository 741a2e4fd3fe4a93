#include "quantizer/algorithms/rounding.h"

#include <array>
#include <cmath>
#include <utility>

#include "base/check.h"
#include "quant/code_traits.h"
#include "quant/levels.h"
#include "quantizer/algorithms/autoround.h"
#include "quantizer/algorithms/drift_error.h"
#include "quantizer/algorithms/gptq.h"
#include "quantizer/algorithms/imatrix.h"
#include "quantizer/algorithms/lwc.h"
#include "quantizer/algorithms/output_error.h"
#include "quantizer/algorithms/refine.h"
#include "quantizer/algorithms/rtn.h"

namespace nibble {
namespace {

constexpr std::array<std::pair<std::string_view, Rounding>, 6> kNames = {
    {{"rtn", Rounding::kRtn},
     {"imatrix", Rounding::kImatrix},
     {"gptq", Rounding::kGptq},
     {"gptaq", Rounding::kGptaq},
     {"autoround", Rounding::kAutoround},
     {"lwc", Rounding::kLwc}}};

bool by_columns(Rounding rounding) {
  return rounding == Rounding::kGptq || rounding == Rounding::kGptaq;
}

bool learned(Rounding rounding) {
  return rounding == Rounding::kAutoround || rounding == Rounding::kLwc;
}

/// What a method can do with these statistics.
Rounding possible(Rounding wanted, const SiteStatistics& site) {
  if (by_columns(wanted) && !site.factor) {
    return Rounding::kImatrix;  // which needs no factor
  }
  return wanted == Rounding::kGptaq && site.drift.empty() ? Rounding::kGptq : wanted;
}

RoundedMatrix round_so(const MatrixToRound& matrix,
                       Rounding rounding,
                       const SiteStatistics& site,
                       ThreadPool& pool) {
  RoundedMatrix rounded;
  rounded.rounding = rounding;
  if (by_columns(rounding)) {
    choose_all_scales(matrix, site.importance.data(), rounded, pool);
    round_by_columns(matrix, site, rounded, pool);
    refine(matrix, site, rounded, pool);
  } else if (learned(rounding)) {
    choose_all_scales(matrix, site.importance.data(), rounded, pool);
    if (rounding == Rounding::kAutoround) {
      learn_offsets(matrix, site, rounded, pool);
    } else {
      learn_clipping(matrix, site, rounded, pool);
    }
  } else {
    round_to_nearest(matrix, rounding == Rounding::kImatrix ? site.importance.data() : nullptr,
                     rounded, pool);
  }
  rounded.error = output_error(*site.gram, {matrix.w, rounded.values.data(), matrix.n}, pool);
  return rounded;
}

}  // namespace

Result<Rounding> parse_rounding(std::string_view name) {
  std::string known;
  for (const auto& [text, rounding] : kNames) {
    if (text == name) {
      return rounding;
    }
    known += known.empty() ? "" : ", ";
    known += text;
  }
  return make_error(StatusCode::kInvalidArgument, "unknown method \"{}\"; choose one of {}", name,
                    known);
}

std::string_view rounding_name(Rounding rounding) {
  for (const auto& [text, value] : kNames) {
    if (value == rounding) {
      return text;
    }
  }
  return {};
}

Status check_rounding(Rounding rounding, const QuantScheme& scheme) {
  const WeightFormat& format = scheme.weight;
  const bool by_rows =
      format.scale_per == ScalePer::kChannel || format.scale_per == ScalePer::kGroup;
  const bool integer = by_rows && is_integer(format.code);
  if (learned(rounding) && in_two_levels(format, scheme.act)) {
    return make_error(StatusCode::kUnsupported,
                      "--method {} changes each group's scale by itself, and those of {} are "
                      "integers times one number of their row; take gptq or imatrix",
                      rounding_name(rounding), scheme.name);
  }
  if (integer || (by_rows && format.code == WeightCode::kFp4E2M1 && !learned(rounding))) {
    return {};
  }
  if (learned(rounding)) {
    return make_error(StatusCode::kUnsupported,
                      "--method {} learns to round integer weights with a scale for each row or "
                      "group, and {} has none; take gptq or imatrix, or choose another scheme",
                      rounding_name(rounding), scheme.name);
  }
  return make_error(StatusCode::kUnsupported,
                    "--method {} rounds integer and FP4 weights with a scale for each row or "
                    "group, and {} has none; leave --calibrate out, or choose another scheme",
                    rounding_name(rounding), scheme.name);
}

SiteStatistics make_site_statistics(const Gram& gram,
                                    Rounding rounding,
                                    ThreadPool& pool,
                                    const Drift* drift) {
  SiteStatistics site;
  if (!gram.finite()) {
    return site;
  }
  site.gram = &gram;
  site.importance = column_importance(gram.diagonal());
  if (by_columns(rounding)) {
    site.factor = make_column_factor(gram, pool);
  }
  if (rounding == Rounding::kGptaq && site.factor && drift != nullptr && drift->finite()) {
    site.drift_sums = drift;
    site.drift = solve_drift(*drift, *site.factor, pool);
  }
  return site;
}

RoundedMatrix round_matrix(const MatrixToRound& matrix,
                           Rounding rounding,
                           const SiteStatistics& site,
                           ThreadPool& pool) {
  CHECK(matrix.encoder->takes_given_rows());
  if (site.gram == nullptr) {
    RoundedMatrix nearest;
    round_to_nearest(matrix, nullptr, nearest, pool);
    return nearest;
  }
  RoundedMatrix kept = round_so(matrix, Rounding::kRtn, site, pool);
  rounding = possible(rounding, site);
  std::optional<DriftError> drift;
  if (rounding == Rounding::kGptaq) {
    drift.emplace(site, ChangedWeights{matrix.w, nullptr, matrix.n}, pool);
    kept.error += drift->of(kept.values.data());
  }
  const double rtn_error = kept.error;
  if (rounding != Rounding::kRtn) {
    RoundedMatrix other = round_so(matrix, rounding, site, pool);
    other.error += drift ? drift->of(other.values.data()) : 0.0;
    if (std::isfinite(other.error) && other.error <= rtn_error) {
      kept = std::move(other);
    }
  }
  const double whole = output_error(*site.gram, {matrix.w, nullptr, matrix.n}, pool);
  kept.error = whole > 0 ? kept.error / whole : 0;
  kept.rtn_error = whole > 0 ? rtn_error / whole : 0;
  kept.outputs = whole;
  return kept;
}

}  // namespace nibble
