#pragma once

#include <cstdint>
#include <memory>

#include "backend/cuda/calibration/calibration_work.h"

namespace nibble::cuda {

/// Weights [n, k] on the device while they are rounded.
struct LoadedWeights {
  const float* w = nullptr;
  int64_t n = 0;
  int64_t stride = 0;  // n, padded
};

/// What rounding in front of a product has changed of its rows, on the device: D = (F - X)^T X of
/// the rows f that would enter it (quantizer/algorithms/drift.h), and what is asked for because of
/// it. Sums are F32 of products of BF16 parts; the rest is F32.
class CudaDrift final {
 public:
  /// kResourceExhausted.
  static Result<std::unique_ptr<CudaDrift>> create(CalibrationWork& work, int64_t k);

  /// Rows x [count, k], and the wanted ones in BF16.
  void add(const SplitRows& x, const void* wanted, int64_t count);
  /// Adds another's sums, times a factor.
  void add_sums(const CudaDrift& other, double factor);
  /// Z of Z R^T = D, by the factor R that `work` has; `share` of it is asked for. False where the
  /// sums are no numbers. kResourceExhausted.
  Result<bool> solve(float share);

  /// Begins to compute what the errors of the weights' roundings lack: W D, and |W Z|^2 in parts
  /// [kDotParts]. kResourceExhausted.
  Status load(const LoadedWeights& weights, double* parts);
  /// D [k, k].
  [[nodiscard]] const float* sums() const { return sums_.as<float>(); }
  /// W D of the weights that were loaded, [n, k].
  [[nodiscard]] const float* products() const { return work_.drift_products.as<float>(); }

  /// to [k, stride] := share W Z of W column by column in the factor's order.
  void ask_columns(const float* turned, int64_t stride, float* to) const;
  /// to [k, stride] := share W D of W column by column as it is.
  void ask_gradients(const float* turned, int64_t stride, float* to) const;

 private:
  CudaDrift(CalibrationWork& work, int64_t k) : work_(work), k_(k) {}
  void solve_block(int64_t begin, int64_t count);
  /// to [k, stride] := share times weights [k, stride], column by column, times `by` [k, k].
  struct Turned {
    const float* weights = nullptr;
    const float* by = nullptr;
    float share = 0;
  };
  void multiply_turned(const Turned& product, int64_t stride, float* to) const;

  CalibrationWork& work_;
  int64_t k_;
  float share_ = 0;
  DeviceBuffer sums_;  // D [k, k]
};

}  // namespace nibble::cuda
