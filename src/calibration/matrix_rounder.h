#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/status.h"
#include "calibration/input_sums.h"
#include "calibration/part_times.h"
#include "quantizer/algorithms/rounding.h"

namespace nibble {

/// Rounds the matrices of one site, by what is known of their inputs.
class MatrixRounder {
 public:
  virtual ~MatrixRounder() = default;
  /// That entered the site.
  [[nodiscard]] virtual int64_t rows() const = 0;
  /// Whether their sums are numbers; if not, codes are the nearest.
  [[nodiscard]] virtual bool has_sums() const = 0;
  /// The rounding that was asked for, and whether there is what gptq, and gptaq, needs.
  [[nodiscard]] virtual Rounding asked() const = 0;
  [[nodiscard]] virtual bool has_factor() const = 0;
  [[nodiscard]] virtual bool has_drift() const { return false; }
  /// Memory for weights that are to be rounded; one piece of a matrix at a time. On a device what
  /// was given before stays valid until the call after the next.
  virtual Result<std::span<float>> weights(size_t count) = 0;
  /// What round_matrix() does. On a device `meanwhile` is called once while that computes, by the
  /// CPU not at all.
  using Meanwhile = std::function<void()>;
  virtual Status round(const MatrixToRound& matrix,
                       RoundedMatrix& out,
                       const Meanwhile& meanwhile) = 0;
};

/// By the CPU, from sums in the host's memory.
class HostRounder final : public MatrixRounder {
 public:
  /// Completes the sums, which must outlive this.
  HostRounder(InputSums& sums, Rounding rounding, ThreadPool& pool, PartTimes& times);

  [[nodiscard]] int64_t rows() const override { return sums_.gram.rows(); }
  [[nodiscard]] bool has_sums() const override { return statistics_.gram != nullptr; }
  [[nodiscard]] Rounding asked() const override { return rounding_; }
  [[nodiscard]] bool has_factor() const override { return statistics_.factor.has_value(); }
  [[nodiscard]] bool has_drift() const override { return !statistics_.drift.empty(); }
  Result<std::span<float>> weights(size_t count) override {
    weights_.resize(count);
    return std::span(weights_);
  }
  Status round(const MatrixToRound& matrix,
               RoundedMatrix& out,
               const Meanwhile& /*meanwhile*/) override {
    times_.time(CalibrationPart::kRounding,
                [&] { out = round_matrix(matrix, rounding_, statistics_, pool_); });
    return {};
  }

 private:
  const InputSums& sums_;
  Rounding rounding_;
  ThreadPool& pool_;
  PartTimes& times_;
  SiteStatistics statistics_;
  std::vector<float> weights_;
};

}  // namespace nibble
