#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/status.h"
#include "quantizer/digest.h"

namespace nibble {

/// How far a calibration has come: written when a layer is done.
struct CalibrationProgress {
  int64_t layer = 0;   // the next one
  int64_t file = 0;    // of the two files of hidden states, the one with its inputs
  std::string digest;  // of these
};

/// "FOLDER/calibration-NAME".
[[nodiscard]] std::string calibration_file(const std::string& folder, std::string_view name);
/// Empty when there is none that can be read.
[[nodiscard]] std::optional<CalibrationProgress> read_calibration_progress(
    const std::string& folder);
/// Replaces it in one step.
Status write_calibration_progress(const std::string& folder, const CalibrationProgress& progress);
/// Removes all files of calibrations.
void remove_calibration_files(const std::string& folder);

}  // namespace nibble
