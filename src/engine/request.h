#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "ops/pooling.h"
#include "ops/sampling_params.h"
#include "ops/token_mask.h"

namespace nibble {

/// kTimeout: its deadline came.
enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kTimeout, kError };

/// What the engine says about a request. Events of one request arrive in order; the last has a
/// finish reason. Tokens are raw ids: text is made outside the engine.
struct TokenEvent {
  int32_t token = -1;  // -1 on a final event without a token
  float logprob = 0;
  std::vector<TokenLogprob> top_logprobs;
  /// With the request's first event, where it asked for them: of prompt tokens 1, 2 ... to the last
  /// (the first has no token before it).
  std::vector<ScoredToken> prompt_logprobs;
  /// With the last event of a request that wants it: [hidden_size], not normalised.
  std::vector<float> pooled;
  FinishReason finish = FinishReason::kNone;
  /// Of kError; kCorrupt when weights are damaged. Of kTimeout without a token: where it was then.
  Status failure;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // prompt tokens served by the prefix cache
  double queue_seconds = 0;   // from the making of the request to its first step
};

/// One generation. The submitter keeps the shared handle to cancel; everything else moves in.
struct Request {
  std::string id;
  std::vector<int32_t> prompt;
  int64_t max_tokens = 16;  // 0: the prompt is computed, and scored if asked for
  int64_t min_tokens = 0;
  SamplingParams sampling;
  std::vector<int32_t> stop_tokens;             // end the answer; the token itself is delivered
  std::vector<std::vector<int32_t>> bad_words;  // no answer has these tokens one after the other
  std::shared_ptr<TokenConstraint> constraint;  // of this answer alone; none: any token may come
  int64_t priority = 0;                         // of those that wait, the lowest is taken first
  int64_t client = 0;                           // those of one priority are served in turns
  double share = 1;                             // of its client, in proportion to others
  std::string cache_salt;                       // only requests with the same one share pages
  bool ignore_eos = false;                      // the model's end tokens do not end the answer
  int top_logprobs = -1;                        // -1: no logprobs; 0..20: that many alternatives
  int prompt_logprobs = -1;                     // the same, of the prompt's tokens
  Pooling pooling = Pooling::kNone;             // of the prompt; such a request has no answer
  std::shared_ptr<std::atomic<bool>> cancelled = std::make_shared<std::atomic<bool>>(false);
  std::chrono::steady_clock::time_point made = std::chrono::steady_clock::now();
  /// When it ends at the latest, whether it waits or runs.
  std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max();
  /// Called by the engine thread for each event; must return at once (hand over to a queue).
  std::function<void(TokenEvent)> on_event;
};

}  // namespace nibble
