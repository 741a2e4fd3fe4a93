#pragma once

#include "calibration/kv_calibrator.h"

namespace nibble {

/// calibrate_kv(), with its progress on stderr and what it chose in the log, unless the model has a
/// sidecar.
Status calibrate_kv_if_missing(const KvCalibrationOptions& options);

}  // namespace nibble
