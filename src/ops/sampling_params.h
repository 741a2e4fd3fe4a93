#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace nibble {

/// How a request's tokens are sampled.
struct SamplingParams {
  double temperature = 1.0;  // 0: greedy
  int64_t top_k = 0;         // 0: off
  double top_p = 1.0;
  double min_p = 0.0;
  double repetition_penalty = 1.0;  // over prompt and answer
  double presence_penalty = 0.0;    // over the answer
  double frequency_penalty = 0.0;   // over the answer
  std::optional<uint64_t> seed;     // same seed, same text, whatever else runs
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<int32_t> allowed_tokens;  // no others are sampled; empty: all may be
};

struct TokenLogprob {
  int32_t token = 0;
  float logprob = 0;  // natural log, of the model's distribution before temperature and filters
  bool operator==(const TokenLogprob&) const = default;
};

/// What a model makes of a token that it did not choose.
struct ScoredToken {
  int32_t token = 0;
  int32_t rank = 0;  // 1: the most likely one
  float logprob = 0;
  std::vector<TokenLogprob> top_logprobs;  // most likely first
  bool operator==(const ScoredToken&) const = default;
};

}  // namespace nibble
