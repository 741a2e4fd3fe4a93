#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "eval/base_file.h"
#include "eval/base_rows.h"
#include "eval/perplexity.h"
#include "eval/probabilities.h"

namespace nibble {

/// Tokens with `from` to `to` tokens of context in front of them.
struct DivergenceBucket {
  int64_t from = 0;
  int64_t to = 0;
  int64_t tokens = 0;
  Estimate kl;
  double same_top = 0;
};

/// Tokens whose divergence is in [from, to) nats.
struct DivergenceBin {
  double from = 0;
  double to = 0;
  int64_t tokens = 0;
};

/// How a model's predictions differ from a base's, over the scored tokens of a text. KL divergences
/// are KL(base || model) over the whole vocabulary, in nats.
struct DivergenceResult {
  int64_t tokens = 0;
  Estimate kl;
  double median = 0, p90 = 0, p99 = 0, p999 = 0, largest = 0;
  Estimate same_top;     // share of tokens at which both have the same likeliest token
  Estimate delta_p;      // probability of the text's token: the model's less the base's
  Estimate delta_p_rms;  // root of its mean square
  Estimate base_nll;     // ln of the perplexity
  Estimate nll;          // the model's
  Estimate log_ratio;    // of the perplexities: the mean of nll - base_nll, paired
  std::vector<DivergenceBucket> buckets;  // 1 to 15 tokens of context, 16 to 31, 32 to 63, ...
  /// Below 1e-7 nats, then four bins a decade, up to the last that has a token.
  std::vector<DivergenceBin> histogram;
};

/// One token's divergence, and how many tokens of its window stand in front of it.
struct PlacedDivergence {
  TokenDivergence at;
  int64_t context = 0;
};

[[nodiscard]] DivergenceResult summarize(std::span<const PlacedDivergence> tokens);

/// Runs a model over windows beside a base. kInvalidArgument: a token outside the vocabulary;
/// kCorrupt: a logit is not finite.
Result<DivergenceResult> evaluate_divergence(BaseRows& base,
                                             LogitReader& reader,
                                             std::span<const EvalWindow> windows,
                                             const EvalRun& run);

/// Runs a base over windows and writes its rows.
Status save_base(LogitReader& reader,
                 std::span<const EvalWindow> windows,
                 const EvalRun& run,
                 BaseFileWriter& writer);

}  // namespace nibble
