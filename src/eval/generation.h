#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "text/tokenizer.h"

namespace nibble {

/// What all prompts of an evaluation are answered with: greedily.
struct GenerationOptions {
  int64_t max_tokens = 256;
  std::vector<std::string> stops;                       // are no part of the answer
  std::function<void(int64_t)> progress = [](auto) {};  // given the answers done
};

/// Answers of an engine, which batches them as it can, in the order of the prompts.
/// Errors: those of Engine::submit(), and the engine's when it fails on the way.
Result<std::vector<std::string>> answer_all(Engine& engine,
                                            const Tokenizer& tokenizer,
                                            const std::vector<std::vector<int32_t>>& prompts,
                                            const GenerationOptions& options);

}  // namespace nibble
