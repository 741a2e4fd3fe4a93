#pragma once

#include "engine/engine.h"
#include "engine/scheduler.h"
#include "kvcache/kv_cache_shape.h"

namespace nibble {

/// Fills in the sizes of steps that are left open.
void fill_open_sizes(EngineOptions& options, const StepSizes& sizes);

/// What a scheduler keeps to, of resolved options.
[[nodiscard]] SchedulerLimits limits_of(const EngineOptions& options, const ModelConfig& config);

/// The cache that resolved options ask for; without pool_pages yet, its num_pages are missing.
[[nodiscard]] KvCacheShape cache_shape(const EngineOptions& options, const ModelConfig& config);

}  // namespace nibble
