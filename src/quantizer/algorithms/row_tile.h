#pragma once

#include <cstdint>
#include <vector>

#include "quantizer/algorithms/rounding.h"
#include "quantizer/kernels/row_kernels.h"

namespace nibble {

/// Up to 64 rows of a matrix while their values are chosen by what they lose of the outputs. With
/// e = w - value a row's loss is e (H + damping) e^T + 2 a e^T, where `a` = kDriftShare w D is what
/// a drift asks for, and its gradient in e is twice e (H + damping) + a. All numbers lie column by
/// column, [k, kRows]; those of rows that are not there are 0.
class RowTile final {
 public:
  static constexpr int64_t kRows = 64;

  /// damping: in parts of the mean diagonal. The drift counts where `with_drift`.
  struct Loss {
    double damping = 0;
    bool with_drift = false;
  };
  RowTile(const MatrixToRound& matrix, const SiteStatistics& site, const Loss& loss);

  /// Rows from `first` on with what they were rounded to.
  void load(int64_t first, const RoundedMatrix& rounded);
  void store(RoundedMatrix& rounded) const;

  struct Columns {
    int64_t begin = 0;
    int64_t count = 0;
  };
  /// After their values changed.
  void update_errors(const Columns& changed);
  /// Computes the gradients of some columns by the errors of all.
  void find_gradients(const Columns& of);
  /// Those of all values, after these changed.
  void find_gradients();
  /// Of each row that is there; the gradients are up to date.
  [[nodiscard]] std::vector<double> losses() const;
  /// to [to.count, kRows] += H of columns `to` and `by`, times numbers [by.count, kRows].
  void add_products(const Columns& to, const Columns& by, const float* numbers, float* out) const;

  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] int64_t k() const { return matrix_.k; }
  [[nodiscard]] int64_t groups() const { return groups_; }
  /// Columns of a group.
  [[nodiscard]] int64_t width() const { return matrix_.k / groups_; }
  [[nodiscard]] const WeightFormat& format() const { return matrix_.format; }
  [[nodiscard]] const Gram& gram() const { return *site_.gram; }
  [[nodiscard]] float damping() const { return damping_; }
  [[nodiscard]] const rows::RowKernels& kernels() const { return kernels_; }

  float* w() { return w_.data(); }
  float* values() { return values_.data(); }
  float* gradients() { return gradients_.data(); }
  /// [groups, kRows]
  float* scales() { return scales_.data(); }
  float* zeros() { return zeros_.data(); }
  [[nodiscard]] bool has_zeros() const { return has_zeros_; }

 private:
  void find_asked();

  const MatrixToRound& matrix_;
  const SiteStatistics& site_;
  Loss loss_;
  const rows::RowKernels& kernels_;
  int64_t groups_;
  float damping_;
  int64_t first_ = 0;
  int64_t rows_ = 0;
  bool has_zeros_ = false;
  std::vector<float> w_;
  std::vector<float> values_;
  std::vector<float> errors_;
  std::vector<float> gradients_;
  std::vector<float> asked_;   // empty without a drift
  std::vector<float> scales_;  // [groups, kRows]
  std::vector<float> zeros_;   // [groups, kRows]
};

}  // namespace nibble
