#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "eval/eval_window.h"
#include "eval/logit_reader.h"
#include "eval/statistics.h"

namespace nibble {

/// How long evaluations run, and who is told.
struct EvalRun {
  ThreadPool& pool;                                     // takes logarithms of probabilities
  std::function<void(int64_t)> progress = [](auto) {};  // given the scored tokens done
};

struct PerplexityResult {
  double perplexity = 0;  // exp of the mean negative log-likelihood of the scored tokens
  double nll_sum = 0;     // nats over all scored tokens
  Estimate nll;           // nats of a token
  int64_t scored_tokens = 0;
};

/// The feeds of some windows, one in each of a reader's sequences: every token but the last, with
/// logits for what is scored.
[[nodiscard]] std::vector<Feed> feeds_of(std::span<const EvalWindow> windows);

/// Perplexity of a text in windows. The reader has room for the longest of them, and runs as many
/// at a time as it has sequences.
/// kInvalidArgument: a token outside the vocabulary. kCorrupt: a logit is not finite.
Result<PerplexityResult> evaluate_perplexity(LogitReader& reader,
                                             std::span<const EvalWindow> windows,
                                             const EvalRun& run);

}  // namespace nibble
