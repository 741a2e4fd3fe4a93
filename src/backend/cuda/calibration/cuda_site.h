#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backend/calibration_math.h"
#include "backend/cuda/calibration/calibration_work.h"
#include "backend/cuda/calibration/cuda_drift.h"

namespace nibble::cuda {

/// The inputs of matrices that multiply the same rows, on the GPU. Sums of BF16 rows are exact
/// products added in F32 by tensor cores; of INT8 and FP8 rows, which are codes times a scale, in
/// two BF16 parts each, so that a product is off by 2^-16 of itself at most. The factor, the
/// rounding by columns, its refinement and the errors are F32 throughout.
class CudaSite final : public SiteMath {
 public:
  static Result<std::unique_ptr<SiteMath>> create(CalibrationWork& work, int64_t k, ActFormat act);
  ~CudaSite() override;

  [[nodiscard]] int64_t k() const override { return k_; }
  [[nodiscard]] int64_t rows() const override { return rows_; }

  void add(const Step& step, const InputRows& rows) override;
  /// Rows [count, k] that are split already.
  void add_rows(const SplitRows& rows, int64_t count);
  Status expect_drift() override;
  void add_drift(const Step& step, const InputRows& rows, const void* wanted) override;
  /// The same of rows that are split already, and of wanted ones in BF16.
  void add_drift_rows(const SplitRows& rows, const void* wanted, int64_t count);
  void add_sums(const SiteMath& other, double factor) override;
  std::vector<float> finish() override;
  Result<bool> factor(std::span<const int32_t> order, const DiagonalDamping& damping) override;
  Result<bool> solve_drift(float share) override;
  Status load(std::span<const float> weights) override;
  void round(RoundingWay way, const MatrixScales& scales) override;
  std::vector<double> take_errors() override;
  void read_values(std::span<float> out) override;
  void read_scales(std::span<float> out) override;

  /// H [k, k] on the device; above the diagonal since finish().
  [[nodiscard]] const float* sums() const { return h(); }
  /// Null where none is expected.
  [[nodiscard]] const CudaDrift* drift() const { return drift_.get(); }
  /// How its rows are rounded.
  [[nodiscard]] ActFormat act() const { return act_; }
  [[nodiscard]] CalibrationWork& work() const { return work_; }

 private:
  CudaSite(CalibrationWork& work, int64_t k, ActFormat act) : work_(work), k_(k), act_(act) {}

  void forget_factors();
  void upload_scales(RoundingWay way, const MatrixScales& scales);
  void round_nearest(const MatrixScales& scales, int64_t groups);
  void turn_in(const MatrixScales& scales, int64_t groups);
  void round_columns(const MatrixScales& scales, int64_t groups);
  /// Begins trace(e H e^T) of e [n, k]; of a rounding's errors with what a drift adds.
  enum class Of : uint8_t { kOutputs, kErrors };
  void square(const float* e, Of of);
  [[nodiscard]] SplitRows prepare(const Step& step, const InputRows& rows) const;
  /// Parts of a sum of CalibrationWork::parts.
  [[nodiscard]] double* parts(size_t sum) const {
    return work_.parts.as<double>() + static_cast<int64_t>(sum) * kDotParts;
  }
  [[nodiscard]] float* h() const { return sums_.as<float>(); }

  CalibrationWork& work_;
  int64_t k_;
  ActFormat act_;
  int64_t rows_ = 0;
  int64_t n_ = 0;                     // rows of the weights that were loaded
  int64_t stride_ = 0;                // the same, padded
  int64_t groups_ = 0;                // of the scales that they were rounded with last
  size_t squared_ = 0;                // errors that were begun
  double damping_ = 0;                // of the factor
  DeviceBuffer sums_;                 // [k, k]
  std::unique_ptr<CudaDrift> drift_;  // null: without
  bool drift_solved_ = false;
  std::array<Of, kRoundingWays> of_{};  // by error that was begun
};

}  // namespace nibble::cuda
