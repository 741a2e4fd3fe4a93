#pragma once

#include "calibration/kv_calibrator.h"

namespace nibble {

/// calibrate_kv() with its progress on stderr.
Result<KvSidecar> calibrate_kv_with_progress(KvCalibrationOptions options);

}  // namespace nibble
