#pragma once

#include <cstdint>
#include <string>

#include "arch/config.h"
#include "base/json.h"
#include "base/status.h"
#include "calibration/site_acts.h"
#include "quantizer/plan.h"

namespace nibble {

/// What is to be known of a model whose activations are in blocks.
struct BlockFiles {
  const QuantizePlan& plan;
  const ModelConfig& config;
  const SiteActs& acts;
  bool permuted = false;  // the model's own channels are in another order than the source's
  int64_t parts = 1;      // of sites that devices may share by columns
  Json calibration;       // its recipe
};

/// Writes the sidecar of a folder whose weights are complete, and announces it in config.json;
/// where inputs are gathered this says so in the place that other programs refuse.
Status write_block_files(const BlockFiles& files, const std::string& folder);

}  // namespace nibble
