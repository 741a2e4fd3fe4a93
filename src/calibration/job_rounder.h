#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "calibration/device_rounder.h"
#include "calibration/input_sums.h"
#include "calibration/layer_runner.h"
#include "calibration/matrix_rounder.h"
#include "calibration/part_times.h"
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
    PartTimes& times;
    int64_t piece_weights;             // CalibrationOptions
    Rounding method;                   // that is asked for
    DeviceRounding* device = nullptr;  // null: the host rounds
  };

  explicit JobRounder(const Parts& parts) : parts_(parts), progress_(parts.context.begin) {}

  /// All jobs of one site; `sums` are completed. Columns of weights are put into the order that the
  /// sums' form says, before they are rounded. Another rounding than the method is recorded as
  /// one for too few rows.
  Status round(const std::vector<size_t>& jobs, InputSums& sums, Rounding rounding);
  /// The same by sums that a device has.
  Status round(const std::vector<size_t>& jobs, SiteMath& site, Rounding rounding);
  /// The job that begins the call after the next one: while a device computes, its weights are
  /// decoded.
  void expect(std::optional<size_t> job) { expected_ = job; }
  /// Says in the log what was kept of how many matrices.
  void report() const;

 private:
  /// A matrix while it is rounded, piece by piece.
  struct Matrix;

  Status round_all(const std::vector<size_t>& jobs, MatrixRounder& rounder);
  Status round_job(size_t index, MatrixRounder& rounder, const std::string& fallback);
  Status round_pieces(Matrix& matrix, MatrixRounder& rounder);
  /// Some rows of a job's matrix.
  struct Piece {
    size_t job = 0;
    int64_t row = 0;
    bool operator==(const Piece&) const = default;
  };
  /// What is to be rounded after a piece, as far as it is known.
  [[nodiscard]] std::optional<Piece> piece_after(const Matrix& matrix, int64_t row) const;
  /// Fills matrix.w, from memory where that was done ahead.
  Status decode(Matrix& matrix, int64_t row, MatrixRounder& rounder);
  Result<std::span<float>> decode_piece(const Piece& piece, MatrixRounder& rounder);
  Result<float> absmax_of_rows(const Matrix& matrix, int64_t row);
  Status finish(Matrix& matrix);

  Parts parts_;
  QuantizeProgress progress_;
  std::optional<ActSpec> act_;           // how rows enter the site's products; empty: by scheme
  std::map<std::string, int64_t> kept_;  // matrices by rounding
  std::map<std::string, int64_t> fallbacks_;  // matrices by reason
  RoundedMatrix rounded_;                     // of a piece
  std::optional<size_t> expected_;            // job behind the site's last one
  std::optional<size_t> next_;                // job behind the one that is rounded
  struct Ahead {
    Piece piece;
    Result<std::span<float>> w;
  };
  std::optional<Ahead> ahead_;  // decoded before it is rounded
};

}  // namespace nibble
