#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"

namespace nibble {

/// The mean of the numbers on the diagonal of such sums.
[[nodiscard]] double mean_diagonal(std::span<const float> diagonal);

/// Sums over the rows x that enter a product: H = X^T X [k, k], which says what an error of its
/// weights costs: E of [n, k] changes the outputs by trace(E H E^T) in squares. Does not depend on
/// the number of threads.
class Gram final {
 public:
  explicit Gram(int64_t k);

  /// Adds rows [rows, k] f32: sums of up to 256 rows in single precision, in the order of the rows,
  /// are added to those before.
  void add(const float* x, int64_t rows, ThreadPool& pool);
  /// Adds another's sums, times a factor, to these; its rows are not counted.
  void add_sums(const Gram& other, double factor);
  /// Completes the lower triangle. Called once, after all rows.
  void finish();

  [[nodiscard]] int64_t k() const { return k_; }
  [[nodiscard]] int64_t rows() const { return rows_; }
  /// Numbers from one row of data() to the next: k, up to a multiple of 16; those past k are 0.
  [[nodiscard]] int64_t stride() const { return stride_; }
  [[nodiscard]] const float* data() const { return sums_.data(); }
  [[nodiscard]] float diagonal(int64_t i) const {
    return sums_[static_cast<size_t>(i * stride_ + i)];
  }
  [[nodiscard]] std::vector<float> diagonal() const;
  [[nodiscard]] double mean_diagonal() const { return nibble::mean_diagonal(diagonal()); }
  /// Whether every sum is a number.
  [[nodiscard]] bool finite() const;

 private:
  int64_t k_;
  int64_t stride_;
  int64_t rows_ = 0;
  std::vector<float> sums_;    // [k, stride]
  std::vector<float> padded_;  // [256, stride], where k is no multiple of 16
};

}  // namespace nibble
