#pragma once

#include <vector>

#include "arch/config.h"
#include "quant/kv_formats.h"

namespace nibble {

/// What each layer keeps in the cache, in `code`. A window that holds every context is none.
[[nodiscard]] std::vector<KvSpec> kv_specs(const ModelConfig& config, KvCode code);

}  // namespace nibble
