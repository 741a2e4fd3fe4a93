#pragma once

#include <cstdint>
#include <memory>

#include "engine/engine.h"
#include "text/tokenizer.h"

namespace nibble {

/// The configuration of the draft model that options.speculation names. kUnsupported where its
/// vocabulary has another size than that of `target`; the errors of load_model_config().
Result<ModelConfig> draft_config(const EngineOptions& options, const ModelConfig& target);

/// What its cache takes of options.kv_bytes, so that it holds as many tokens as that of the target;
/// 0 without a draft model. The errors of draft_config(), and of a cache that `backend` has no
/// kernels for.
Result<int64_t> draft_kv_bytes(const EngineOptions& options,
                               const ModelConfig& target,
                               const Backend& backend);

/// Loads it for an engine with these options, which must be resolved; null if they name none.
Result<std::unique_ptr<Model>> load_draft_model(const EngineOptions& options,
                                                const ModelConfig& target,
                                                Backend& backend);

/// kUnsupported with the first token that differs between the vocabulary of the draft model in
/// `draft_dir` and that of the target; the errors of Tokenizer::load().
Status check_same_tokens(const Tokenizer& target, const std::string& draft_dir);

}  // namespace nibble
