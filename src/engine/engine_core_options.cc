#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine/bad_words.h"
#include "engine/engine_core.h"
#include "engine/engine_limits.h"
#include "engine/memory_plan.h"
#include "engine/page_shares.h"

namespace nibble {
namespace {

// Limits far above any use: they keep products of options in int64.
constexpr int64_t kMostPerStep = int64_t{1} << 20;
constexpr int64_t kMostPageSize = 4096;
constexpr int64_t kPageSize = 16;  // of CPUs
constexpr int64_t kMostPositions = int64_t{1} << 31;

// `name` is the flag of `nibble serve` that sets the option.
Status require_between(const char* name, int64_t value, int64_t most) {
  if (value > 0 && value <= most) {
    return {};
  }
  return make_error(StatusCode::kInvalidArgument, "{} {}: must be between 1 and {}", name, value,
                    most);
}

// Finds out.pool_pages, and limits out.max_model_len to what they hold.
Status resolve_pages(EngineOptions& out, const ModelConfig& config, const Backend* backend) {
  const KvCacheShape shape = cache_shape(out, config);
  const std::vector<KvPool> pools = kv_pools(shape.layers);
  if (out.pool_pages.empty() && out.num_pages > 0) {
    out.pool_pages.assign(pools.size(), out.num_pages);
  } else if (out.pool_pages.empty()) {
    NIBBLE_ASSIGN_OR_RETURN(
        out.pool_pages,
        share_pages(shape, useful_pages(out, pools), out.kv_bytes - out.draft_kv_bytes, backend));
  }
  CHECK_EQ(out.pool_pages.size(), pools.size());
  out.num_pages = std::ranges::max(out.pool_pages);
  int64_t longest = out.max_model_len;
  for (size_t pool = 0; pool < pools.size(); ++pool) {
    longest = std::min(
        longest, longest_sequence(pools[pool].spec.window, out.page_size, out.pool_pages[pool]));
  }
  if (longest < out.max_model_len) {
    NIBBLE_LOG(kWarning, "the KV cache holds {} tokens: max_model_len is {} instead of {}", longest,
               longest, out.max_model_len);
    out.max_model_len = longest;
  }
  return {};
}

// Fills in the sizes of steps that are left open.
Status resolve_sizes(EngineOptions& out) {
  fill_open_sizes(out, preferred_sizes(out.prefer, StepDevice::kCpu));
  NIBBLE_RETURN_IF_ERROR(require_between("--max-num-seqs", out.max_num_seqs, kMostPerStep));
  NIBBLE_RETURN_IF_ERROR(
      require_between("--max-num-batched-tokens", out.max_num_batched_tokens, kMostPerStep));
  out.max_num_batched_tokens = std::max(out.max_num_batched_tokens, out.max_num_seqs);
  out.max_mixed_prefill = std::min(out.max_mixed_prefill, out.max_num_batched_tokens);
  return {};
}

}  // namespace

Result<EngineOptions> EngineCore::resolve(const EngineOptions& options,
                                          const ModelConfig& config,
                                          const Backend* backend) {
  EngineOptions out = options;
  if (out.page_size == 0) {
    const int64_t of_cpus = kv_has_residual(out.kv_code) ? kChannelTokens : kPageSize;
    out.page_size = backend != nullptr ? backend->preferred_page_size(out.kv_code) : of_cpus;
  }
  out.kv_bytes = out.kv_bytes == 0 ? kHostKvBytes : out.kv_bytes;
  NIBBLE_RETURN_IF_ERROR(resolve_sizes(out));
  NIBBLE_RETURN_IF_ERROR(
      require_between("--max-queued-requests", out.max_queued_requests, kMostPerStep));
  NIBBLE_RETURN_IF_ERROR(require_between("--block-size", out.page_size, kMostPageSize));
  if (out.max_model_len < 0 || out.num_pages < 0) {
    return make_error(StatusCode::kInvalidArgument,
                      "--max-model-len {} and the number of pages {} must not be negative",
                      out.max_model_len, out.num_pages);
  }
  if (out.max_model_len == 0) {
    out.max_model_len = config.max_position;
  }
  if (config.max_position > 0 && out.max_model_len > config.max_position) {
    return make_error(StatusCode::kInvalidArgument,
                      "--max-model-len {}: the model's positions end at {} "
                      "(config.json: {})",
                      out.max_model_len, config.max_position, positions_name(config));
  }
  NIBBLE_RETURN_IF_ERROR(require_between("--max-model-len", out.max_model_len, kMostPositions));
  out.max_prompt_rows = prompt_rows(out, config);
  NIBBLE_RETURN_IF_ERROR(resolve_pages(out, config, backend));
  return out;
}

Status EngineCore::check(const Request& request,
                         const EngineOptions& options,
                         const ModelConfig& config) {
  const auto invalid = StatusCode::kInvalidArgument;
  if (request.prompt.empty()) {
    return make_error(invalid, "the prompt has no tokens");
  }
  const auto length = static_cast<int64_t>(request.prompt.size());
  const int64_t answer = request.max_tokens == 0 ? 0 : 1;
  if (length > options.max_model_len - answer) {
    return make_error(invalid,
                      "the prompt has {} tokens, but the limit is {} (max_model_len {} less {} "
                      "token of answer)",
                      length, options.max_model_len - answer, options.max_model_len, answer);
  }
  for (const int32_t token : request.prompt) {
    if (token < 0 || token >= config.vocab_size) {
      return make_error(invalid,
                        "the prompt has token id {}, but the model's vocabulary has {} tokens; the "
                        "tokenizer may belong to another model",
                        token, config.vocab_size);
    }
  }
  if (request.max_tokens < 0) {
    return make_error(invalid, "max_tokens is {}, but must not be negative", request.max_tokens);
  }
  if (std::max(request.top_logprobs, request.prompt_logprobs) > kMaxTopLogprobs) {
    return make_error(invalid, "top_logprobs and prompt_logprobs are {} and {}, but at most {}",
                      request.top_logprobs, request.prompt_logprobs, kMaxTopLogprobs);
  }
  if (request.pooling != Pooling::kNone && request.max_tokens > 0) {
    return make_error(invalid, "max_tokens is {}, but a request for a pooled prompt has no answer",
                      request.max_tokens);
  }
  NIBBLE_RETURN_IF_ERROR(check_bad_words(request, config.vocab_size));
  return Sampler::check(request.sampling, config.vocab_size);
}

}  // namespace nibble
