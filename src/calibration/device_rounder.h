#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "backend/calibration_math.h"
#include "base/thread_pool.h"
#include "calibration/matrix_rounder.h"
#include "calibration/part_times.h"

namespace nibble {

/// What rounding on a device works with, for all sites of a calibration: memory of the host that is
/// copied fast, threads that choose scales, and the clock.
class DeviceRounding final {
 public:
  DeviceRounding(CalibrationMath& math, ThreadPool& pool, PartTimes& times)
      : math_(math), pool_(pool), times_(times) {}

  [[nodiscard]] CalibrationMath& math() { return math_; }
  [[nodiscard]] ThreadPool& pool() { return pool_; }
  [[nodiscard]] PartTimes& times() { return times_; }
  /// Of two buffers the one that was not given last. kUnavailable.
  Result<std::span<float>> weights(size_t count) {
    turn_ = 1 - turn_;
    return room(weights_.at(turn_), count);
  }
  /// kUnavailable.
  Result<std::span<float>> values(size_t count) { return room(values_, count); }
  /// Adds what the device did since the last call; waits.
  void note_seconds();

 private:
  Result<std::span<float>> room(DeviceBuffer& buffer, size_t count);

  CalibrationMath& math_;
  ThreadPool& pool_;
  PartTimes& times_;
  std::array<DeviceBuffer, 2> weights_;
  size_t turn_ = 0;
  DeviceBuffer values_;
};

/// Rounds by sums that a device has: scales are chosen by the CPU's threads as ever, codes and
/// errors are found on the device.
class DeviceRounder final : public MatrixRounder {
 public:
  /// Completes the sums, and factors them where the rounding needs that: what a site whose sums
  /// have no factor is rounded by is HostRounder's choice. Site and parts must outlive this.
  static Result<std::unique_ptr<MatrixRounder>> create(SiteMath& site,
                                                       Rounding rounding,
                                                       DeviceRounding& parts);

  [[nodiscard]] int64_t rows() const override { return site_.rows(); }
  [[nodiscard]] bool has_sums() const override { return !importance_.empty(); }
  [[nodiscard]] Rounding asked() const override { return asked_; }
  [[nodiscard]] bool has_factor() const override { return by_columns(rounding_); }
  [[nodiscard]] bool has_drift() const override { return rounding_ == Rounding::kGptaq; }
  Result<std::span<float>> weights(size_t count) override { return parts_.weights(count); }
  Status round(const MatrixToRound& matrix,
               RoundedMatrix& out,
               const Meanwhile& meanwhile) override;

 private:
  DeviceRounder(SiteMath& site, Rounding rounding, DeviceRounding& parts)
      : site_(site), asked_(rounding), rounding_(rounding), parts_(parts) {}
  static bool by_columns(Rounding rounding) {
    return rounding == Rounding::kGptq || rounding == Rounding::kGptaq;
  }
  Status prepare();
  /// Where the rounding asks for it and there is one.
  Status take_drift();
  /// Chooses scales for a rounding, and begins to round with them.
  void attempt(const MatrixToRound& matrix, Rounding rounding, RoundedMatrix& out);
  void begin(const MatrixToRound& matrix, const RoundedMatrix& scales);
  Status read_values(RoundedMatrix& out, size_t count);

  SiteMath& site_;
  Rounding asked_;
  Rounding rounding_;  // as far as the sums allow it
  DeviceRounding& parts_;
  std::vector<float> importance_;  // empty: the sums are no numbers
  RoundedMatrix other_;            // of the method, beside the nearest
};

}  // namespace nibble
