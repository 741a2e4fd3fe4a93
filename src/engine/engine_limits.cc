#include "engine/engine_limits.h"

#include "arch/kv_specs.h"

namespace nibble {

void fill_open_sizes(EngineOptions& options, const StepSizes& sizes) {
  const auto fill = [](int64_t& value, int64_t size) { value = value == 0 ? size : value; };
  fill(options.max_num_seqs, sizes.max_num_seqs);
  fill(options.max_num_batched_tokens, sizes.max_num_batched_tokens);
  fill(options.max_mixed_prefill, sizes.max_mixed_prefill);
}

SchedulerLimits limits_of(const EngineOptions& options, const ModelConfig& config) {
  SchedulerLimits limits{.max_num_seqs = options.max_num_seqs,
                         .max_num_batched_tokens = options.max_num_batched_tokens,
                         .max_mixed_prefill = options.max_mixed_prefill,
                         .max_prompt_rows = options.max_prompt_rows,
                         .page_size = options.page_size};
  if (config.rope.kind == RopeKind::kDynamicNtk) {
    limits.longest_shared_prompt = config.rope.original_max_position;
  }
  return limits;
}

KvCacheShape cache_shape(const EngineOptions& options, const ModelConfig& config) {
  return {.layers = kv_specs(config, options.kv_code),
          .page_size = options.page_size,
          .num_pages = options.pool_pages};
}

}  // namespace nibble
