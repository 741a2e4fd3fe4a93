#include "engine/draft_loader.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>

#include "arch/kv_specs.h"
#include "arch/model_text.h"
#include "engine/draft_model.h"
#include "kvcache/kv_cache_shape.h"

namespace nibble {
namespace {

std::string where(const std::string& folder) {
  return fmt::format("--speculative-config: model {}", folder);
}

KvCacheShape page_shape(const EngineOptions& options, const ModelConfig& config) {
  return {.layers = kv_specs(config, options.kv_code),
          .page_size = std::max<int64_t>(options.page_size, 1)};
}

// Bytes of a page of all layers.
int64_t page_bytes(const KvCacheShape& shape) {
  const std::vector<int64_t> pools = shape.page_bytes();
  return std::accumulate(pools.begin(), pools.end(), int64_t{0});
}

}  // namespace

Result<ModelConfig> draft_config(const EngineOptions& options, const ModelConfig& target) {
  const std::string& folder = options.speculation.draft_model;
  NIBBLE_RETURN_IF_ERROR(check_is_model(folder).with_context(where(folder)));
  auto config = load_model_config(folder);
  if (!config.ok()) {
    return config.status().with_context(where(folder));
  }
  if (config->vocab_size != target.vocab_size) {
    return make_error(StatusCode::kUnsupported,
                      "{}: its vocabulary has {} tokens and that of the served model {}; a draft "
                      "model must have the same, such as a quantized form of the served one",
                      where(folder), config->vocab_size, target.vocab_size);
  }
  return config;
}

Result<int64_t> draft_kv_bytes(const EngineOptions& options,
                               const ModelConfig& target,
                               const Backend& backend) {
  if (options.speculation.draft_model.empty()) {
    return 0;
  }
  NIBBLE_ASSIGN_OR_RETURN(const ModelConfig draft, draft_config(options, target));
  const KvCacheShape shape = page_shape(options, draft);
  NIBBLE_RETURN_IF_ERROR(
      shape.check(backend, draft.num_heads).with_context(where(options.speculation.draft_model)));
  const int64_t all = options.kv_bytes == 0 ? kHostKvBytes : options.kv_bytes;
  const auto own = static_cast<double>(page_bytes(shape));
  const auto others = static_cast<double>(page_bytes(page_shape(options, target)));
  return static_cast<int64_t>(static_cast<double>(all) * (own / (own + others)));
}

Result<std::unique_ptr<Model>> load_draft_model(const EngineOptions& options,
                                                const ModelConfig& target,
                                                Backend& backend) {
  const std::string& folder = options.speculation.draft_model;
  if (folder.empty()) {
    return std::unique_ptr<Model>();
  }
  NIBBLE_RETURN_IF_ERROR(draft_config(options, target).status());
  auto model = load_model(folder, backend, DraftModel::model_options(options));
  if (!model.ok()) {
    return model.status().with_context(where(folder));
  }
  return model;
}

Status check_same_tokens(const Tokenizer& target, const std::string& draft_dir) {
  const auto loaded = Tokenizer::load(draft_dir);
  NIBBLE_RETURN_IF_ERROR(loaded.status().with_context(where(draft_dir)));
  const Tokenizer& draft = **loaded;
  const int32_t most = std::max(target.vocab_size(), draft.vocab_size());
  for (int32_t id = 0; id < most; ++id) {
    if (target.token_bytes(id) != draft.token_bytes(id)) {
      return make_error(StatusCode::kUnsupported,
                        "{}: its token {} is not that of the served model; a draft model must have "
                        "the same vocabulary, such as a quantized form of the served one",
                        where(draft_dir), id);
    }
  }
  return {};
}

}  // namespace nibble
