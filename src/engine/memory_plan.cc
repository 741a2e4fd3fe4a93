#include "engine/memory_plan.h"

#include <algorithm>

#include "arch/kv_specs.h"
#include "base/log.h"
#include "checkpoint/checkpoint_reader.h"
#include "engine/draft_loader.h"
#include "engine/draft_model.h"
#include "engine/engine_limits.h"
#include "kvcache/kv_cache_shape.h"
#include "model/decoder_scratch.h"

namespace nibble {
namespace {

constexpr int64_t kReserve = int64_t{1} << 30;
constexpr int64_t kScratchShare = 8;  // of what the weights leave, unless sizes are asked for

int64_t step_bytes(const ModelConfig& config, const ModelOptions& steps, const Backend& backend) {
  return decoder_scratch(config, steps, backend).total() +
         backend.step_bytes(step_limits(config, steps));
}

int64_t scratch_bytes(const EngineOptions& options,
                      const ModelConfig& config,
                      const Backend& backend) {
  EngineOptions with_rows = options;
  with_rows.max_prompt_rows = prompt_rows(options, config);
  return step_bytes(config, model_options(with_rows), backend);
}

Result<int64_t> weight_bytes(const std::string& model_dir, const ModelConfig& config) {
  NIBBLE_ASSIGN_OR_RETURN(const CheckpointReader weights, CheckpointReader::open(model_dir));
  // A tied table is kept once more as a head, unless it is read as it is in the file.
  const bool twice = config.tie_word_embeddings && config.dtype != DType::kBF16;
  const int64_t table = config.vocab_size * config.hidden_size * 2;
  return weights.total_bytes() + (twice ? table : 0);
}

// Adds what a draft model needs besides its cache.
Status add_draft(const EngineOptions& options,
                 const ModelConfig& target,
                 const Backend& backend,
                 MemoryPlan& plan) {
  const std::string& folder = options.speculation.draft_model;
  if (folder.empty()) {
    return {};
  }
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig draft, draft_config(options, target));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t weights, weight_bytes(folder, draft));
  plan.weights += weights;
  plan.scratch += step_bytes(draft, DraftModel::model_options(options), backend);
  return {};
}

std::string figures(const MemoryPlan& plan, const Backend& backend) {
  return fmt::format(
      "weights take {} MiB, scratch memory {} MiB, {} MiB stay in reserve, and {} "
      "has {} MiB free",
      plan.weights >> 20, plan.scratch >> 20, plan.reserve >> 20, backend.name(), plan.free >> 20);
}

}  // namespace

ModelOptions model_options(const EngineOptions& options) {
  return {.max_batch_tokens = options.max_num_batched_tokens,
          .max_logit_rows = options.max_num_seqs + options.max_prompt_rows,
          // Where tokens are proposed, one for each row of a step that verifies them.
          .max_sequences = std::max(options.max_num_seqs,
                                    options.speculation.tokens > 0 ? kMostSpeculatedRows : 0),
          .kv_code = options.kv_code,
          .ignore_fmpq = options.ignore_fmpq};
}

int64_t prompt_rows(const EngineOptions& options, const ModelConfig& config) {
  constexpr int64_t kFewest = 16;
  if (options.max_prompt_rows > 0) {
    return options.max_prompt_rows;
  }
  const int64_t row = config.vocab_size * static_cast<int64_t>(sizeof(float));
  return std::min(std::max(kPromptLogitBytes / row, kFewest),
                  std::max(options.max_num_batched_tokens, options.max_num_seqs));
}

Result<MemoryPlan> plan_memory(const EngineOptions& options,
                               const std::string& model_dir,
                               const ModelConfig& config,
                               const Backend& backend) {
  MemoryPlan plan;
  plan.free = backend.free_memory();
  NIBBLE_ASSIGN_OR_RETURN(plan.weights, weight_bytes(model_dir, config));
  plan.scratch = scratch_bytes(options, config, backend);
  plan.reserve = kReserve;
  plan.margin = plan.free / 16;
  NIBBLE_RETURN_IF_ERROR(add_draft(options, config, backend, plan));
  return plan;
}

Result<EngineOptions> choose_step_sizes(const EngineOptions& options,
                                        const std::string& model_dir,
                                        const ModelConfig& config,
                                        const Backend& backend) {
  EngineOptions out = options;
  if (backend.host_memory()) {
    fill_open_sizes(out, preferred_sizes(options.prefer, StepDevice::kCpu));
    return out;
  }
  StepSizes sizes = preferred_sizes(options.prefer, StepDevice::kGpu);
  fill_open_sizes(out, sizes);
  if (options.max_num_seqs > 0 && options.max_num_batched_tokens > 0) {
    return out;
  }
  NIBBLE_ASSIGN_OR_RETURN(const MemoryPlan plan, plan_memory(out, model_dir, config, backend));
  const int64_t most = (plan.free - plan.weights - plan.reserve) / kScratchShare;
  const EngineOptions first = out;
  while (scratch_bytes(out, config, backend) > most && halve(sizes)) {
    out = options;
    fill_open_sizes(out, sizes);
  }
  if (out.max_num_seqs < first.max_num_seqs ||
      out.max_num_batched_tokens < first.max_num_batched_tokens) {
    NIBBLE_LOG(
        kInfo,
        "steps of {} sequences and {} tokens instead of {} and {}: their scratch memory is to "
        "take {} MiB at most, an eighth of what the weights leave",
        out.max_num_seqs, out.max_num_batched_tokens, first.max_num_seqs,
        first.max_num_batched_tokens, most >> 20);
  }
  return out;
}

Result<EngineOptions> resolve_in_memory(const EngineOptions& asked,
                                        const std::string& model_dir,
                                        const ModelConfig& config,
                                        const Backend& backend) {
  const int64_t page_size =
      asked.page_size != 0 ? asked.page_size : backend.preferred_page_size(asked.kv_code);
  KvCacheShape shape{.layers = kv_specs(config, asked.kv_code), .page_size = page_size};
  NIBBLE_RETURN_IF_ERROR(shape.check(backend, config.num_heads));
  NIBBLE_ASSIGN_OR_RETURN(const EngineOptions options,
                          choose_step_sizes(asked, model_dir, config, backend));
  if (backend.host_memory()) {
    EngineOptions shared = options;
    shared.page_size = page_size;
    NIBBLE_ASSIGN_OR_RETURN(shared.draft_kv_bytes, draft_kv_bytes(shared, config, backend));
    return Engine::resolve_options(shared, config, &backend);
  }
  NIBBLE_ASSIGN_OR_RETURN(const MemoryPlan plan, plan_memory(options, model_dir, config, backend));
  EngineOptions wanted = options;
  if (options.kv_bytes == 0) {
    wanted.kv_bytes = plan.cache();
  }
  if (wanted.kv_bytes <= 0) {
    return make_error(
        StatusCode::kResourceExhausted,
        "{}: no memory for a KV cache: {}; end what else uses the GPU, quantize, serve "
        "with a lower --max-num-batched-tokens, or use --device cpu",
        model_dir, figures(plan, backend));
  }
  wanted.page_size = page_size;
  NIBBLE_ASSIGN_OR_RETURN(wanted.draft_kv_bytes, draft_kv_bytes(wanted, config, backend));
  NIBBLE_ASSIGN_OR_RETURN(const EngineOptions out,
                          Engine::resolve_options(wanted, config, &backend));
  shape.num_pages = out.pool_pages;
  const int64_t cache = shape.bytes(&backend) + out.draft_kv_bytes;
  if (cache > plan.most_cache()) {
    return make_error(StatusCode::kResourceExhausted,
                      "{}: the KV cache of {} MiB does not fit: {}; lower --kv-cache-memory, or "
                      "end what else uses the GPU",
                      model_dir, cache >> 20, figures(plan, backend));
  }
  NIBBLE_LOG(kInfo, "GPU memory: {} MiB free, {} weights, {} scratch, {} for the KV cache",
             plan.free >> 20, plan.weights >> 20, plan.scratch >> 20, cache >> 20);
  return out;
}

}  // namespace nibble
