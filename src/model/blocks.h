#pragma once

#include <vector>

#include "arch/config.h"
#include "base/status.h"
#include "checkpoint/turned_inputs.h"

namespace nibble {

/// Whether there is a block for every part of the model: kUnsupported names the part that none
/// computes.
Status check_blocks(const ModelConfig& config);

/// Whether a block turns all inputs that are to be turned: kUnsupported names the first other one.
/// Routed experts and what is no MLP have none.
Status check_turned_inputs(const ModelConfig& config, const std::vector<TurnedInputs>& turned);

}  // namespace nibble
