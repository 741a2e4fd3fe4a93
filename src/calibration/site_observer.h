#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "base/thread_pool.h"
#include "calibration/input_sums.h"
#include "calibration/part_times.h"
#include "core/device_buffer.h"
#include "layers/row_observer.h"

namespace nibble {

/// Adds up the rows of one site; does without its products.
class SiteObserver final : public RowObserver {
 public:
  SiteObserver(InputSums& sums, ThreadPool& pool, PartTimes& times)
      : sums_(sums), pool_(pool), times_(times) {}

  /// With a drift, before each window: what the product reads there in the model without rounding,
  /// before norm or activation.
  Status read_wanted(const Windows& windows, Kept what, int64_t window);
  /// The same, where it is in memory; valid until the next.
  void set_wanted(const void* rows) { raw_ = rows; }

  Then observe(Step& step, const InputRows& rows) override;

 private:
  InputSums& sums_;
  ThreadPool& pool_;
  PartTimes& times_;
  std::vector<std::byte> kept_;
  const void* raw_ = nullptr;  // as the product reads it
  std::vector<float> rows_;
  std::vector<float> wanted_;
};

/// The same on a device.
class DeviceObserver final : public RowObserver {
 public:
  struct Parts {
    Backend& backend;
    CalibrationMath& math;
  };
  DeviceObserver(SiteMath& site, const Parts& parts) : site_(site), parts_(parts) {}

  /// As of SiteObserver, where the site expects a drift. kResourceExhausted.
  Status read_wanted(const Windows& windows, Kept what, int64_t window);
  /// The same, where it is on the device; valid until the next.
  void set_wanted(const void* rows) { raw_ = rows; }

  Then observe(Step& step, const InputRows& rows) override;

 private:
  SiteMath& site_;
  Parts parts_;
  const void* raw_ = nullptr;  // as the product reads it; null: no drift
  std::vector<std::byte> kept_;
  DeviceBuffer wanted_;
};

}  // namespace nibble
