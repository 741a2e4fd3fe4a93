#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "eval/logit_reader.h"
#include "eval/task_item.h"
#include "text/tokenizer.h"

namespace nibble {

/// A choice in tokens: tokens[first_scored ...] are its continuation.
struct ChoiceTokens {
  std::vector<int32_t> tokens;
  int64_t first_scored = 0;
};

/// Encodes context and continuation together and cuts after as many tokens as the context alone
/// has, with blanks at its end moved to the continuation: lm-eval's rule. Both begin as prompts do.
/// A text longer than `longest` loses tokens in front.
/// kInvalidArgument: a continuation without tokens of its own, or longer than `longest`.
Result<ChoiceTokens> encode_choice(const Tokenizer& tokenizer,
                                   const Choice& choice,
                                   int64_t longest);

/// What a model makes of one choice.
struct ChoiceScore {
  double log_likelihood = 0;  // nats, over the tokens of the continuation
  bool greedy = true;         // each of them is the likeliest
};

/// Scores the choices of all items; those of an item share what their beginnings have in common,
/// which is computed once. The reader has room for the longest choice, and works on as many items
/// at a time as it has sequences.
/// kCorrupt: a logit is not finite.
struct ScoringRun {
  ThreadPool& pool;
  std::function<void(int64_t)> progress = [](auto) {};  // given the items done
};
Result<std::vector<std::vector<ChoiceScore>>> score_choices(
    LogitReader& reader, std::span<const std::vector<ChoiceTokens>> items, const ScoringRun& run);

}  // namespace nibble
