#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "calibration/input_sums.h"
#include "calibration/layer_runner.h"
#include "quantizer/job_maker.h"

namespace nibble {

/// Rounds matrices by what is known of their inputs, stores them, and lets the layers that follow
/// see the rounded ones.
class JobRounder final {
 public:
  struct Parts {
    const JobMakerContext& context;
    LayerRunner& runner;
    ThreadPool& pool;
    int64_t piece_weights;  // CalibrationOptions
    Rounding method;        // that is asked for
  };

  explicit JobRounder(const Parts& parts) : parts_(parts), progress_(parts.context.begin) {}

  /// All jobs of one site; `sums` are completed. Another rounding than the method is recorded as
  /// one for too few rows.
  Status round(const std::vector<size_t>& jobs, InputSums& sums, Rounding rounding);
  /// Says in the log what was kept of how many matrices.
  void report() const;

 private:
  struct Inputs {
    const SiteStatistics& statistics;
    Rounding rounding;
    int64_t rows;
    std::string fallback;  // CalibrationRecord
  };
  /// A matrix while it is rounded, piece by piece.
  struct Matrix;

  Status round_job(size_t index, const Inputs& inputs);
  Status round_pieces(Matrix& matrix, const Inputs& inputs);
  Status finish(Matrix& matrix);

  Parts parts_;
  QuantizeProgress progress_;
  std::map<std::string, int64_t> kept_;       // matrices by rounding
  std::map<std::string, int64_t> fallbacks_;  // matrices by reason
};

}  // namespace nibble
