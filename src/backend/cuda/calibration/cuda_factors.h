#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "backend/calibration_math.h"
#include "core/device_buffer.h"

namespace nibble::cuda {

class CalibrationWork;

/// Factors of the sums of sites (SiteMath::factor()), side by side on the device: kernels and
/// products work on all of them at once.
class CudaFactors final {
 public:
  struct Request {
    const void* site = nullptr;  // whose they are
    const float* h = nullptr;    // [k, k], complete
    std::span<const int32_t> order;
    DiagonalDamping damping;
  };
  struct Factor {
    const void* site = nullptr;
    std::vector<int32_t> order;
    DiagonalDamping damping;
    bool made = false;                      // all pivots are positive
    const float* r = nullptr;               // [k, k], on the device
    const int32_t* device_order = nullptr;  // [k]
  };

  /// Factors all, of k columns each, in place of those before. Waits. kResourceExhausted.
  Status make(CalibrationWork& work, int64_t k, std::span<const Request> requests);
  /// One of those that were made last; null: none like it.
  [[nodiscard]] const Factor* find(const Request& request) const;
  /// Finds those of a site no more.
  void forget(const void* site);

 private:
  void begin(CalibrationWork& work, std::span<const Request> requests);
  void factor_blocks(CalibrationWork& work);
  void factor_rest(CalibrationWork& work, int64_t begin, int64_t count);
  [[nodiscard]] float* factor(int64_t index) const {
    return factors_.as<float>() + index * k_ * k_;
  }

  int64_t k_ = 0;
  int64_t count_ = 0;
  DeviceBuffer factors_, panels_, inverses_;  // [count, k, k], [count, k, 128], [count, 128, 128]
  DeviceBuffer orders_, failed_;              // [count, k], [count]
  std::vector<Factor> made_;
};

}  // namespace nibble::cuda
