#include "eval/probabilities.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace nibble {

namespace {

double log_sum_exp_under(std::span<const float> logits, double largest) {
  double sum = 0;
  for (const float logit : logits) {
    sum += std::exp(static_cast<double>(logit) - largest);
  }
  return std::log(sum) + largest;
}

}  // namespace

double log_sum_exp(std::span<const float> logits) {
  return log_sum_exp_under(logits, *std::ranges::max_element(logits));
}

double negative_log_likelihood(std::span<const float> logits, int32_t target) {
  return log_sum_exp(logits) - static_cast<double>(logits[static_cast<size_t>(target)]);
}

int32_t top_token(std::span<const float> logits) {
  return static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
}

TokenDivergence compare_logits(std::span<const float> base,
                               std::span<const float> logits,
                               int32_t target) {
  CHECK_EQ(base.size(), logits.size());
  const int32_t base_top = top_token(base);
  const double base_largest = base[static_cast<size_t>(base_top)];
  double base_sum = 0;
  double weighted = 0;  // of base - logits, by the base's odds
  for (size_t i = 0; i < base.size(); ++i) {
    const auto logit = static_cast<double>(base[i]);
    const double odds = std::exp(logit - base_largest);
    base_sum += odds;
    weighted += odds * (logit - static_cast<double>(logits[i]));
  }
  const double base_lse = std::log(base_sum) + base_largest;
  const int32_t top = top_token(logits);
  const double lse = log_sum_exp_under(logits, logits[static_cast<size_t>(top)]);
  const auto at = static_cast<size_t>(target);
  return {.kl = weighted / base_sum - base_lse + lse,
          .base_nll = base_lse - static_cast<double>(base[at]),
          .nll = lse - static_cast<double>(logits[at]),
          .same_top = base_top == top};
}

}  // namespace nibble
