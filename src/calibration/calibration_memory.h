#pragma once

#include <cstdint>

#include "arch/config.h"
#include "quantizer/algorithms/rounding.h"
#include "quantizer/plan.h"

namespace nibble {

struct CalibrationNeed {
  const QuantizePlan& plan;
  const ModelConfig& config;
  Rounding rounding = Rounding::kGptq;
  int64_t rows = 0;           // of a window
  int64_t piece_weights = 0;  // CalibrationOptions
  int threads = 1;
};

/// Bytes that rounding the layers of a model one after the other takes at its worst point, beside
/// what the process has already: one layer as it is run, those of its matrices that are rounded as
/// codes; the sums of products of one input, with what its method makes of them; a piece of a
/// matrix with its values; rows of a window. Of experts the sums of one and those of their layer.
/// Does not depend on the number of layers.
[[nodiscard]] int64_t calibration_memory(const CalibrationNeed& need);

}  // namespace nibble
