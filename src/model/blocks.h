#pragma once

#include "arch/config.h"
#include "base/status.h"

namespace nibble {

/// Whether there is a block for every part of the model: kUnsupported names the part that none
/// computes.
Status check_blocks(const ModelConfig& config);

}  // namespace nibble
