#pragma once

#include "calibration/calibration_text.h"
#include "command.h"

namespace nibble {

/// --calibration-windows and --calibration-length: how much of a text a model reads.
void add_window_flags(CLI::App& command, CalibrationTextOptions& text);

}  // namespace nibble
