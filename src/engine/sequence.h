#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/draft_gain.h"
#include "engine/request.h"
#include "engine/speculation.h"
#include "kvcache/prefix_cache.h"

namespace nibble {

struct DraftShadow;
struct MaskJob;

/// A request inside the engine: its tokens, its pages and how far it is computed.
struct Sequence {
  Request request;
  int64_t arrival = 0;  // order of service among those of one priority
  int64_t turn = 0;     // of its last admission: order in which running sequences keep their pages
  uint64_t seed = 0;    // of request.sampling, or drawn when the request gave none

  std::vector<int32_t> tokens;  // prompt and answer
  std::vector<int32_t> salt;    // bytes of request.cache_salt
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of the prompt, at first admission
  bool admitted = false;      // at least once
  bool counted = false;       // in the engine's statistics
  double queue_seconds = 0;   // until it was counted

  // Cache: the first `computed` tokens have keys and values in `lists`, one list for each pool,
  // except those that no later token sees.
  std::vector<PrefixCache::PageList> lists;
  int64_t computed = 0;
  int64_t charged = 0;        // so many tokens were charged to its client
  int64_t offered_pages = 0;  // leading pages already offered to the prefix cache
  PrefixCache::NodeId node = PrefixCache::kRoot;

  std::vector<int32_t> draft;           // proposed to follow the tokens
  DraftGain draft_gain;                 // of its proposals
  std::shared_ptr<DraftShadow> shadow;  // what a draft model has of it

  /// Tokens seen so far, with how often the answer has them; kept only when penalties need it.
  std::unordered_map<int32_t, int32_t> seen;

  // Where the request asks for log-probabilities of its prompt.
  std::vector<ScoredToken> prompt_scores;  // of prompt tokens 1, 2 ..., until they are reported
  int64_t scored = 0;                      // so many of them
  [[nodiscard]] bool scores_prompt() const {
    return request.prompt_logprobs >= 0 && scored < prompt_tokens - 1;
  }
  /// Rows of logits that score prompt tokens when the next `num_tokens` tokens are computed: of
  /// `count` tokens from `begin` on, each for the token behind it.
  struct PromptRows {
    int64_t begin = 0;
    int64_t count = 0;
  };
  [[nodiscard]] PromptRows prompt_rows(int64_t num_tokens) const {
    if (!scores_prompt()) {
      return {};
    }
    const int64_t begin = std::max(computed, scored);
    return {begin,
            std::max<int64_t>(std::min(computed + num_tokens, prompt_tokens - 1) - begin, 0)};
  }

  // Where it wants final hidden states pooled.
  std::vector<double> pooled;  // their sum
  int64_t pooled_tokens = 0;   // so many are done with
  /// Those of the next `num_tokens` tokens that are wanted.
  [[nodiscard]] PromptRows pooled_rows(int64_t num_tokens) const {
    const int64_t end = computed + num_tokens;
    if (request.pooling == Pooling::kMean) {
      const int64_t begin = std::max(computed, pooled_tokens);
      return {begin, std::max<int64_t>(end - begin, 0)};
    }
    const bool last = request.pooling == Pooling::kLast && end == prompt_tokens;
    return last ? PromptRows{end - 1, 1} : PromptRows{};
  }
  /// Tokens in front that need not be computed where others have their keys and values.
  [[nodiscard]] int64_t skippable() const {
    int64_t most = length() - 1;  // the last token's logits or hidden state are wanted
    if (scores_prompt()) {
      most = std::min(most, scored);
    }
    return request.pooling == Pooling::kMean ? std::min(most, pooled_tokens) : most;
  }

  /// Whether a token is sampled when all tokens are computed.
  [[nodiscard]] bool wants_token() const { return generated() < request.max_tokens; }

  /// Tokens that may come after the first `mask_length` ones, as request.constraint has it; empty:
  /// all.
  std::vector<uint32_t> mask;
  int64_t mask_length = 0;
  std::shared_ptr<MaskJob> mask_job;  // null unless the mask is being filled

  [[nodiscard]] int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  [[nodiscard]] int64_t generated() const { return length() - prompt_tokens; }
  [[nodiscard]] int64_t remaining() const { return length() - computed; }
};

/// Whether one stands before another in the queue: by priority, then arrival.
[[nodiscard]] inline bool goes_before(const std::unique_ptr<Sequence>& a,
                                      const std::unique_ptr<Sequence>& b) {
  return std::pair(a->request.priority, a->arrival) < std::pair(b->request.priority, b->arrival);
}

}  // namespace nibble
