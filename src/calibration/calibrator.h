#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "backend/open_backend.h"
#include "calibration/calibration_text.h"
#include "calibration/site_acts.h"
#include "quantizer/algorithms/method.h"
#include "quantizer/job_maker.h"

namespace nibble {

struct CalibrationOptions {
  std::string model;  // folder of the source
  CalibrationTextOptions text;
  Rounding rounding = Rounding::kGptq;
  std::vector<Transform> transforms = {};  // that made the model, for the recipe
  SiteActs acts = {};                      // of schemes with activations in blocks
  int64_t parts = 1;                       // of these: split_parts()
  Json blocks = {};                        // how they were chosen, for the recipe; null: none are
  /// Computes the layers, the sums and the codes; its threads are those of the run.
  BackendOptions backend = {.device = "cpu"};
  /// Of a matrix, rounded and judged at a time: a head of 150,000 rows need not be in memory in
  /// F32.
  int64_t piece_weights = int64_t{1} << 25;
};

/// Rounds the matrices of a model by what they multiply when it reads a text: layer by layer, and
/// within one first q, k and v, then the output of attention, gate and up, and down, of experts as
/// of dense MLPs, each with what comes before it rounded already; last the output head, where the
/// plan has codes for it. Hidden states are in files of the work folder, or, of a GPU, in memory
/// where that has room; one layer at a time is in memory, and an interrupted run goes on with the
/// layer that it was in, or that it was in a minute before.
/// Errors: those of read_model_text(), load_model_config() and open_backend(); kUnsupported for
/// roundings that a GPU does not compute; kInvalidArgument for fewer tokens
/// than a quarter of the widest matrix (fewer than all of it are warned of).
Result<std::unique_ptr<JobMaker>> make_calibrator(const CalibrationOptions& options);

}  // namespace nibble
