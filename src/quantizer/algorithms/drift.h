#pragma once

#include <cstdint>
#include <vector>

#include "base/thread_pool.h"
#include "quantizer/algorithms/factor.h"

namespace nibble {

/// Sums over the rows x that enter a product and the rows f that would if nothing in front of it
/// had been rounded: D = (F - X)^T X [k, k]. Does not depend on the number of threads.
class Drift final {
 public:
  explicit Drift(int64_t k);

  /// Rows of both, [rows, k] f32, are added as Gram::add() adds them.
  struct Rows {
    const float* x = nullptr;
    const float* wanted = nullptr;  // f
    int64_t count = 0;
  };
  void add(const Rows& rows, ThreadPool& pool);
  /// Adds another's sums, times a factor, to these.
  void add_sums(const Drift& other, double factor);

  [[nodiscard]] int64_t k() const { return k_; }
  /// As of Gram.
  [[nodiscard]] int64_t stride() const { return stride_; }
  [[nodiscard]] const float* data() const { return sums_.data(); }
  [[nodiscard]] bool finite() const;

 private:
  int64_t k_;
  int64_t stride_;
  std::vector<float> sums_;     // [k, stride]
  std::vector<float> padded_;   // [256, stride]
  std::vector<float> changes_;  // [256, stride]: f - x
};

/// The part of what a drift asks for that is given: alpha of GPTAQ (arXiv 2504.02692), which takes
/// 0.25 of the upper triangle of Z.
inline constexpr float kDriftShare = 0.5F;

/// kDriftShare times Z of Z R^T = D, columns and rows of D in the factor's order, [k, stride]:
/// element (i, j) says what weight i of a row asks of column j, so that the row's products come
/// nearer to those with f (with Q the rounded weights and E = W - Q: |Q X - W F|^2 = |E R + W Z|^2
/// and a constant, but for the damping in R).
[[nodiscard]] std::vector<float> solve_drift(const Drift& drift,
                                             const ColumnFactor& factor,
                                             ThreadPool& pool);

}  // namespace nibble
