#pragma once

#include <cstdint>
#include <string>

#include "arch/config.h"
#include "backend/backend.h"
#include "engine/engine.h"

namespace nibble {

/// How the memory of a GPU is shared out, in bytes; planned before anything is loaded.
struct MemoryPlan {
  int64_t free = 0;     // before loading
  int64_t weights = 0;  // the model's tensors, and a tied table's copy; a draft model's as well
  int64_t scratch = 0;  // activations and logits of the largest step, of each model
  int64_t reserve = 0;  // for the driver, libraries and recorded steps
  int64_t margin = 0;   // stays free unless a size of the cache is asked for

  /// Most that the cache may take when its size is asked for, and what it gets by itself.
  [[nodiscard]] int64_t most_cache() const { return free - weights - scratch - reserve; }
  [[nodiscard]] int64_t cache() const { return most_cache() - margin; }
};

/// How a model must be loaded for an engine with these options.
[[nodiscard]] ModelOptions model_options(const EngineOptions& options);

/// Its max_prompt_rows; where that is 0, what kPromptLogitBytes hold: at least 16, and no more than
/// a step has tokens.
[[nodiscard]] int64_t prompt_rows(const EngineOptions& options, const ModelConfig& config);

/// The plan for the model in `model_dir` on a backend with memory of its own; options.max_num_seqs
/// and max_num_batched_tokens must not be open. Fails where its weights cannot be opened.
Result<MemoryPlan> plan_memory(const EngineOptions& options,
                               const std::string& model_dir,
                               const ModelConfig& config,
                               const Backend& backend);

/// `options` with the sizes of steps that were left open: those of its device, on GPUs halved until
/// their scratch memory is at most an eighth of what the weights leave. The errors of
/// plan_memory().
Result<EngineOptions> choose_step_sizes(const EngineOptions& options,
                                        const std::string& model_dir,
                                        const ModelConfig& config,
                                        const Backend& backend);

/// Engine::resolve_options() with step sizes that were chosen so, and a cache that fits: of the
/// size that was asked for, else what a GPU has left; in the host's memory, a draft model's cache
/// has its part of that. kResourceExhausted with the figures when weights, scratch memory and cache
/// need more than is free; kUnsupported for a cache that there are no kernels for, and what the
/// backend's check_kv() finds.
Result<EngineOptions> resolve_in_memory(const EngineOptions& asked,
                                        const std::string& model_dir,
                                        const ModelConfig& config,
                                        const Backend& backend);

}  // namespace nibble
