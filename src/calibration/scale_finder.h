#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "calibration/model_transform.h"
#include "quantizer/algorithms/smoothing.h"
#include "quantizer/plan.h"

namespace nibble {

struct ScaleFinding {
  std::string model;               // folder
  const CheckpointReader& reader;  // of the plan's matrices
  const QuantizePlan& plan;        // of this model: what its matrices are rounded to
  const std::vector<std::vector<int32_t>>& windows;
  FactorRule rule = FactorRule::kLargest;
  double outlier_share = 0.16;  // of blocks that are to have the more bits, where activations have
                                // blocks
  int block = 128;              // of these where weights have a scale for each row
  std::string beside;           // where a file for hidden states is made, which has no name
  int threads = 1;
  const std::atomic<bool>* stop = nullptr;
};

/// Runs the model, unrounded, layer by layer over the windows, and finds what the channels that
/// enter its products are best divided by. What the plan leaves as it is stays so, as do the inputs
/// of experts and of products after an activation that does not commute with factors.
/// Errors: those of load_model(); kCancelled, kIo.
Result<std::vector<LayerFactors>> find_factors(const ScaleFinding& finding);

}  // namespace nibble
