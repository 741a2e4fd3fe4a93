#pragma once

#include <cstdint>
#include <span>

namespace nibble {

/// ln(sum(exp(logits))), in double precision; not finite where a logit is NaN or +infinity.
[[nodiscard]] double log_sum_exp(std::span<const float> logits);

/// -ln(softmax(logits)[target]) in nats, in double precision.
[[nodiscard]] double negative_log_likelihood(std::span<const float> logits, int32_t target);

/// The first of the largest.
[[nodiscard]] int32_t top_token(std::span<const float> logits);

/// What two models make of one place of a text.
struct TokenDivergence {
  double kl = 0;        // sum over the vocabulary of p (ln p - ln q), p the base's, nats
  double base_nll = 0;  // of the text's token, nats
  double nll = 0;
  bool same_top = false;
};

/// From the logits of both, in double precision.
///   base, logits: [vocab_size]
[[nodiscard]] TokenDivergence compare_logits(std::span<const float> base,
                                             std::span<const float> logits,
                                             int32_t target);

}  // namespace nibble
