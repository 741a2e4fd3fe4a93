#pragma once

#include <vector>

#include "arch/config.h"
#include "base/status.h"
#include "checkpoint/turned_inputs.h"

namespace nibble {

/// Whether a block turns all inputs that are to be turned: kUnsupported names the first other one.
/// Routed experts and what is no MLP have none.
Status check_turned_inputs(const ModelConfig& config, const std::vector<TurnedInputs>& turned);

}  // namespace nibble
