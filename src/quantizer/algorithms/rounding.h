#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "quantizer/algorithms/factor.h"
#include "quantizer/algorithms/gram.h"
#include "quantizer/encoder.h"

namespace nibble {

/// How weights become codes, given what enters the product.
///   kRtn      the nearest codes, as without calibration
///   kImatrix  the nearest codes, of scales whose search counts a column by its mean square
///   kGptq     scales likewise, codes column by column: later columns make good for earlier ones
enum class Rounding : uint8_t { kRtn, kImatrix, kGptq };

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
  double error = 0;      // trace(E H E^T) over that of the weights themselves: of the outputs
  double rtn_error = 0;  // the same of kRtn
};

/// What all matrices with one input share.
struct SiteStatistics {
  const Gram* gram = nullptr;
  std::vector<float> importance;       // [k], mean 1, positive
  std::optional<ColumnFactor> factor;  // of kGptq; empty: none could be made
};

/// The statistics that a rounding needs. A gram with sums that are no numbers gives none.
SiteStatistics make_site_statistics(const Gram& gram, Rounding rounding, ThreadPool& pool);

/// Rounds a matrix by the method; where that loses more of the outputs than kRtn, or has no
/// statistics, kRtn is kept. Does not depend on the number of threads.
RoundedMatrix round_matrix(const MatrixToRound& matrix,
                           Rounding rounding,
                           const SiteStatistics& site,
                           ThreadPool& pool);

}  // namespace nibble
