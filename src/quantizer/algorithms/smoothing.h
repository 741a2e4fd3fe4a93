#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

/// What is known of the rows that enter the products of a site.
struct ChannelStatistics {
  std::vector<float> largest;  // [k]: of the magnitudes
  std::vector<double> sums;    // [k]: likewise
  std::vector<float> sample;   // [rows, k]: some of the rows

  [[nodiscard]] int64_t k() const { return static_cast<int64_t>(largest.size()); }
  [[nodiscard]] int64_t sample_rows() const {
    return largest.empty() ? 0 : static_cast<int64_t>(sample.size() / largest.size());
  }
};

/// What is expected of a choice of blocks that is made later.
struct ExpectedBlocks {
  int block = 128;
  double outlier_share = 0.16;  // of blocks of the more bits
};

/// Which factors are tried.
enum class FactorRule : uint8_t {
  // largest or mean activation^a over largest weight^(1 - a), a from 0.05 to 0.95 (SmoothQuant,
  // whose
  // largest ones may be of a few tokens alone)
  kLargest,
  kMean,  // mean activation^a, a from 0.05 to 1 (AWQ)
};

struct FactorSearch {
  FactorRule rule = FactorRule::kLargest;
  ActFormat act = ActFormat::kFloat;
  /// Of rows in blocks: channels are ordered by the mean of their squares, and the largest have the
  /// more bits.
  ExpectedBlocks blocks = {};
  const ChannelStatistics& site;
  /// Matrices of the site, or some of their rows.
  std::span<const MatrixToRound> matrices;
  /// The factor that channel i takes, [k]: channels that one channel of values becomes share it.
  /// Empty: its own.
  std::vector<int32_t> factor_of;
};

/// What each channel is to be divided by, and its weights multiplied by, so that the sampled rows,
/// rounded to the activations' format, times the weights, rounded to the nearest codes, differ
/// least from what they are, by their squares and relative to each row's. All 1 where nothing is
/// better than that. [k], or as many as factor_of has. Does not depend on the number of threads.
[[nodiscard]] std::vector<float> search_factors(const FactorSearch& search, ThreadPool& pool);

}  // namespace nibble
