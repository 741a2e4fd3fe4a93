#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "quantizer/algorithms/drift.h"
#include "quantizer/algorithms/factor.h"
#include "quantizer/algorithms/gram.h"
#include "quantizer/encoder.h"

namespace nibble {

/// How weights become codes, given what enters the product.
///   kRtn      the nearest codes, as without calibration
///   kImatrix  the nearest codes, of scales whose search counts a column by its mean square
///   kGptq     scales likewise, codes column by column: later columns make good for earlier ones;
///             then both are refined in turns
///   kGptaq    the same, and for what roundings in front of the product have changed
///   kAutoround  offsets of weights and factors of such scales, learned by signed steps
///   kLwc      the nearest codes in ranges whose clipping is learned
enum class Rounding : uint8_t { kRtn, kImatrix, kGptq, kGptaq, kAutoround, kLwc };

Result<Rounding> parse_rounding(std::string_view name);
[[nodiscard]] std::string_view rounding_name(Rounding rounding);
/// kUnsupported, naming the scheme and what can be done, for a scheme that the method cannot round.
Status check_rounding(Rounding rounding, const QuantScheme& scheme);

/// A matrix to round, as its encoder stores it.
struct MatrixToRound {
  const float* w = nullptr;  // [n, k]
  int64_t n = 0;
  int64_t k = 0;
  WeightFormat format;
  const MatrixEncoder* encoder = nullptr;  // takes_given_rows()
};

/// Values that its codes mean, with what decodes them.
struct RoundedMatrix {
  std::vector<float> scales;           // [n, groups]
  std::vector<float> zeros;            // [n, groups]; empty without zero points
  std::vector<float> values;           // [n, k]
  Rounding rounding = Rounding::kRtn;  // what was kept
  // trace(E H E^T) over that of the weights themselves: of the outputs. With a drift the distance
  // to the unrounded model's outputs, less what no values can change (DriftError).
  double error = 0;
  double rtn_error = 0;  // the same of kRtn
  double outputs = 0;    // what they are shares of
};

/// What all matrices with one input share.
struct SiteStatistics {
  const Gram* gram = nullptr;
  std::vector<float> importance;       // [k], mean 1, positive
  std::optional<ColumnFactor> factor;  // of kGptq and kGptaq; empty: none could be made
  const Drift* drift_sums = nullptr;   // of kGptaq; null: none, and it is kGptq
  std::vector<float> drift;            // solve_drift() of them
};

/// The statistics that a rounding needs; kGptaq needs a drift, too. A gram with sums that are no
/// numbers gives none.
SiteStatistics make_site_statistics(const Gram& gram,
                                    Rounding rounding,
                                    ThreadPool& pool,
                                    const Drift* drift = nullptr);

/// Rounds a matrix by the method; where that loses more of the outputs than kRtn, or has no
/// statistics, kRtn is kept. Does not depend on the number of threads.
RoundedMatrix round_matrix(const MatrixToRound& matrix,
                           Rounding rounding,
                           const SiteStatistics& site,
                           ThreadPool& pool);

}  // namespace nibble
