#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "ops/sampling_params.h"

namespace nibble {

/// What sampling one token depends on besides the logits.
struct SamplerInput {
  const SamplingParams& params;
  uint64_t seed = 0;
  int64_t step = 0;  // tokens generated before: with the seed it fixes the random number
  /// Tokens of prompt and answer, with how often the answer has them. Read only by penalties.
  const std::unordered_map<int32_t, int32_t>& seen;
  std::span<const int32_t> banned;  // never sampled (end tokens before min_tokens)
  /// Tokens that may be sampled [mask_words(vocab_size)], as in ops/token_mask.h; empty: all.
  std::span<const uint32_t> mask = {};
  int top_logprobs = -1;  // as in Request
};

struct SampledToken {
  int32_t token = 0;
  float logprob = 0;
  std::vector<TokenLogprob> top_logprobs;  // most likely first
};

/// Why a row has no token: kCorrupt, and kInvalidArgument.
[[nodiscard]] Status not_finite_logits();
[[nodiscard]] Status no_token_left();

/// Samples tokens. The order is: log-probabilities of the untouched logits; bias; repetition, then
/// presence and frequency penalties; bans and the mask; greedy choice, or temperature, top-k, top-p
/// (of what top-k left), min-p (of the most likely one's probability), and a draw. Ties go to the
/// smaller token id. Holds scratch memory only: the result depends on the arguments alone.
class Sampler final {
 public:
  explicit Sampler(int64_t vocab_size);

  /// Samples from one row of logits [vocab_size], which is overwritten. kCorrupt when the row has a
  /// NaN or an infinity, kInvalidArgument when bans and biases leave no token.
  Result<SampledToken> sample(std::span<float> logits, const SamplerInput& input);

  /// The log-probability and rank of `token` and the `count` most likely tokens by the untouched
  /// logits [vocab_size], computed and ordered as sample() does. kCorrupt as there.
  Result<ScoredToken> score(std::span<const float> logits, int32_t token, int count);

  /// kInvalidArgument names the parameter that is out of range, and the range.
  [[nodiscard]] static Status check(const SamplingParams& params, int64_t vocab_size);
  [[nodiscard]] static bool needs_seen(const SamplingParams& params);
  /// What logits are multiplied by before a draw.
  [[nodiscard]] static float inverse_temperature(double temperature) {
    return static_cast<float>(1.0 / std::max(temperature, 1e-6));
  }

 private:
  struct Candidate {
    float logit;
    int32_t token;
    float weight;  // proportional to the probability
  };
  static bool less_likely(const Candidate& a, const Candidate& b) {
    return a.logit != b.logit ? a.logit < b.logit : a.token > b.token;
  }
  static bool more_likely(const Candidate& a, const Candidate& b) { return less_likely(b, a); }

  [[nodiscard]] double take_top(std::span<const float> logits,
                                int count,
                                std::vector<TokenLogprob>& out);
  void keep_top_k(int64_t k);
  void keep_top_p(double p);
  [[nodiscard]] int32_t draw(std::span<const float> logits,
                             float largest,
                             const SamplerInput& input);

  std::vector<Candidate> candidates_;
  std::vector<float> raw_;  // the untouched logits, when log-probabilities are wanted
};

}  // namespace nibble
