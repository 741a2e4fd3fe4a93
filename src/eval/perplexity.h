#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "model/model.h"

namespace nibble {

struct PerplexityOptions {
  int64_t window = 512;  // tokens
  int threads = 0;       // that take logarithms of probabilities; 0 means one per usable core
  std::function<void(int64_t)> progress = [](int64_t) {};  // called after each window
};

struct PerplexityResult {
  double perplexity = 0;      // exp of the mean negative log-likelihood of the scored tokens
  double nll_sum = 0;         // nats over all scored tokens
  int64_t scored_tokens = 0;  // the first token of each window is context only
};

/// Perplexity of a tokenized text, cut into windows of `options.window` tokens without overlap.
/// What is left at the end is not scored, as published figures do; a text shorter than one window
/// is one window. `cache` needs room for one window. `options.progress` is given the tokens done.
/// kInvalidArgument: window < 2, longer than the model or the cache; fewer than two tokens, or one
/// outside the vocabulary. kCorrupt: a logit is not finite.
Result<PerplexityResult> evaluate_perplexity(Model& model,
                                             PagedKvCache& cache,
                                             std::span<const int32_t> tokens,
                                             const PerplexityOptions& options);

}  // namespace nibble
