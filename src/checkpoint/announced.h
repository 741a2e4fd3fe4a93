#pragma once

#include <string_view>

#include "base/status.h"
#include "checkpoint/checkpoint_reader.h"
#include "checkpoint/dialect.h"

namespace nibble {

/// kCorrupt when a config that announces quantized weights stands beside a checkpoint that holds
/// none: one of the two belongs to another model. Modules that are left out of the quantization are
/// no matter, as long as there is one that is not.
///   dialect  of the config, which has at least one group
///   where    "config.json: quantization_config"
Status check_announced(const CheckpointReader& reader, Dialect dialect, std::string_view where);

}  // namespace nibble
