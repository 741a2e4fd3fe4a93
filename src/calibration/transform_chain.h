#pragma once

#include <string>
#include <vector>

#include "calibration/calibration_text.h"
#include "quantizer/algorithms/method.h"
#include "quantizer/algorithms/smoothing.h"
#include "quantizer/quantize.h"

namespace nibble {

struct ChainOptions {
  const QuantizeOptions& quantize;  // what is to become of the source
  std::vector<Transform> transforms;
  CalibrationTextOptions text;  // of those that need one
  uint64_t seed = 0;            // of rotations
  ExpectedBlocks blocks = {};   // of schemes with activations in blocks
};

/// Makes one model folder after the other, each from the one before by a transform: the last,
/// "DESTINATION.transformed-N", computes what the source does. Its weights are plain, so that on
/// the disk it takes two to four bytes a weight. A folder that an interrupted run left is taken
/// again if the source and all that decides it are the same. Returns the last folder's path.
/// Errors: those of make_plan(), read_model_text(), make_rotation(), find_factors() and
/// write_transformed_model().
Result<std::string> make_transformed(const ChainOptions& options);

/// Removes what make_transformed() made for a destination.
void remove_transformed(const std::string& destination);

}  // namespace nibble
