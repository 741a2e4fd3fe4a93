#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include "backend/cuda/calibration/cuda_factors.h"
#include "backend/cuda/calibration/device_timer.h"
#include "backend/cuda/calibration/kernels.h"
#include "backend/cuda/calibration/matmul.h"
#include "backend/cuda/input_rounding.h"

namespace nibble::cuda {

inline constexpr size_t kRoundingWays = 4;
/// Errors of each way, what a drift adds to them, and what it adds to all.
inline constexpr int64_t kSumsOfErrors = 2 * int64_t{kRoundingWays} + 1;

/// Rows as sums of products take them: numbers as they are, or in two parts.
struct SplitRows {
  const void* high = nullptr;  // [rows, k] bf16
  const void* low = nullptr;   // what high lacks; null: nothing
};

/// What the sites of a calibration share: memory of the device that grows, and one stream.
class CalibrationWork final {
 public:
  static Result<std::unique_ptr<CalibrationWork>> create(cudaStream_t stream);

  /// Makes room; what was there is lost. kResourceExhausted.
  static Status room(DeviceBuffer& buffer, int64_t bytes, std::string_view what);

  /// The rows that a product with this form of activations reads; valid until the next.
  SplitRows prepare(InputRounding rounding);
  /// The same in BF16, in memory of their own.
  const void* prepare_wanted(InputRounding rounding);
  /// The same of rows that are rounded already.
  SplitRows split(const QuantizedRows& rows, int64_t count, int64_t k);

  /// H += rows^T rows: below the diagonal, and some above.
  void add_products(const SplitRows& rows, int64_t count, int64_t k, float* h);
  void multiply(const MatmulShape& shape, const MatmulOperands& operands);

  cudaStream_t stream;
  std::unique_ptr<Matmul> matmul;
  DeviceTimer sums_timer, factor_timer, rounding_timer, forward_timer;
  CudaFactors alone, ahead;      // of the site that is rounded, of some before that
  CudaFactors::Factor factored;  // that is rounded by
  const void* loaded = nullptr;  // the site of the weights

  DeviceBuffer rounded, row_scales, high, low;       // rows
  DeviceBuffer panel, inverse;                       // [k, 128], [128, 128]: of a drift
  DeviceBuffer failed, diagonal, parts;              // int32, [k], [kSumsOfErrors, kDotParts] f64
  DeviceBuffer weights, values, turned, sums;        // [n, k], or [k, n] padded
  DeviceBuffer errors;                               // [128, n]
  DeviceBuffer scales, turned_scales, turned_zeros;  // [n, groups], [groups, n]
  DeviceBuffer products, moved;                      // [k, n], [n]: of scales that are refined
  DeviceBuffer changes_high, changes_low, wanted;    // rows, of a drift
  DeviceBuffer asked, drift_products;                // [k, k], [n, k]: of a drift
  std::array<DeviceBuffer, kRoundingWays> sent_scales;  // of the host, by way, page-locked

 private:
  explicit CalibrationWork(cudaStream_t on) : stream(on) {}
};

}  // namespace nibble::cuda
