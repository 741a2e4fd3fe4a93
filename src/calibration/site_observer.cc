#include "calibration/site_observer.h"

#include "base/check.h"

namespace nibble {

Status SiteObserver::read_wanted(const Windows& windows, Kept what, int64_t window) {
  kept_.resize(static_cast<size_t>(windows.bytes(what)));
  raw_ = kept_.data();
  return windows.read(what, window, kept_);
}

RowObserver::Then SiteObserver::observe(Step& step, const InputRows& rows) {
  CHECK_EQ(rows.width, sums_.gram.k());
  rows_.resize(static_cast<size_t>(step.rows() * rows.width));
  step.input_rows(rows, rows_.data());
  if (sums_.drift) {
    wanted_.resize(rows_.size());
    InputRows wanted = rows;
    wanted.x = {raw_, rows.x.type};
    step.input_rows(wanted, wanted_.data());
  }
  times_.time(CalibrationPart::kSums, [&] {
    sums_.add({.x = rows_.data(), .wanted = wanted_.data(), .count = step.rows()}, pool_);
  });
  return Then::kSkip;
}

Status DeviceObserver::read_wanted(const Windows& windows, Kept what, int64_t window) {
  kept_.resize(static_cast<size_t>(windows.bytes(what)));
  NIBBLE_RETURN_IF_ERROR(windows.read(what, window, kept_));
  if (wanted_.size() == 0) {
    NIBBLE_ASSIGN_OR_RETURN(wanted_, parts_.backend.allocate(kept_.size()));
  }
  parts_.math.upload(wanted_.as<void>(), kept_);
  raw_ = wanted_.as<void>();
  return {};
}

RowObserver::Then DeviceObserver::observe(Step& step, const InputRows& rows) {
  site_.add(step, rows);
  if (raw_ != nullptr) {
    site_.add_drift(step, rows, raw_);
  }
  return Then::kSkip;
}

}  // namespace nibble
