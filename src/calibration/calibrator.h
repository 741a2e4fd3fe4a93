#pragma once

#include <memory>
#include <string>
#include <vector>

#include "calibration/calibration_text.h"
#include "quantizer/algorithms/method.h"
#include "quantizer/job_maker.h"

namespace nibble {

struct CalibrationOptions {
  std::string model;  // folder of the source
  CalibrationTextOptions text;
  Rounding rounding = Rounding::kGptq;
  std::vector<Transform> transforms = {};  // that made the model, for the recipe
};

/// Rounds the matrices of attention and dense MLPs by what they multiply when the model reads a
/// text: layer by layer, and within one first q, k and v, then the output of attention, gate and
/// up, and down, each with what comes before it rounded already. Hidden states are in files of the
/// work folder; one layer at a time is in memory, and an interrupted run goes on with the layer
/// that it was in. What else the plan encodes (experts, the head) is left to the pipeline.
/// Errors: those of read_model_text() and load_model_config(); kInvalidArgument for fewer tokens
/// than a quarter of the widest matrix (fewer than all of it are warned of).
Result<std::unique_ptr<JobMaker>> make_calibrator(const CalibrationOptions& options);

}  // namespace nibble
