#include "ops/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "ops/sampling.h"
#include "ops/token_mask.h"

namespace nibble {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Index of the largest value, the first of equals.
int32_t argmax(std::span<const float> values) {
  return static_cast<int32_t>(std::max_element(values.begin(), values.end()) - values.begin());
}

bool all_finite(std::span<const float> values) {
  // x * 0 is 0 for finite x and NaN otherwise: a sum without branches, which vectorizes.
  float sum = 0;
  for (const float x : values) {
    sum += x * 0.0F;
  }
  return sum == 0.0F;
}

void apply_bias_and_penalties(std::span<float> logits, const SamplerInput& input) {
  const SamplingParams& params = input.params;
  for (const auto& [token, bias] : params.logit_bias) {
    logits[static_cast<size_t>(token)] += bias;
  }
  if (!Sampler::needs_seen(params)) {
    return;
  }
  const auto repetition = static_cast<float>(params.repetition_penalty);
  for (const auto& [token, count] : input.seen) {
    float& logit = logits[static_cast<size_t>(token)];
    logit = logit > 0 ? logit / repetition : logit * repetition;
    if (count > 0) {
      logit -= static_cast<float>(params.presence_penalty + params.frequency_penalty * count);
    }
  }
}

void keep_allowed(std::span<float> logits, std::span<const int32_t> allowed) {
  std::vector<float> kept;
  kept.reserve(allowed.size());
  for (const int32_t token : allowed) {
    kept.push_back(logits[static_cast<size_t>(token)]);
  }
  std::ranges::fill(logits, kMinusInfinity);
  for (size_t i = 0; i < allowed.size(); ++i) {
    logits[static_cast<size_t>(allowed[i])] = kept[i];
  }
}

// Most words of a grammar's mask are all zeros or all ones.
void apply_mask(std::span<float> logits, std::span<const uint32_t> mask) {
  CHECK_EQ(std::ssize(mask), mask_words(std::ssize(logits)));
  constexpr size_t kBits = 32;
  for (size_t first = 0; first < logits.size(); first += kBits) {
    const uint32_t word = mask[first / kBits];
    const std::span<float> part = logits.subspan(first, std::min(kBits, logits.size() - first));
    if (word == 0) {
      std::ranges::fill(part, kMinusInfinity);
    } else if (word != ~uint32_t{0}) {
      for (size_t bit = 0; bit < part.size(); ++bit) {
        part[bit] = ((word >> bit) & 1U) != 0 ? part[bit] : kMinusInfinity;
      }
    }
  }
}

Status out_of_range(const char* name, double value, const char* range) {
  return make_error(StatusCode::kInvalidArgument, "{} is {}, but must be {}", name, value, range);
}

}  // namespace

Status not_finite_logits() {
  return {StatusCode::kCorrupt, "the model's logits have a NaN or an infinity"};
}

Status no_token_left() {
  return {StatusCode::kInvalidArgument,
          "bans, biases, penalties and masks leave no token to sample"};
}

Sampler::Sampler(int64_t vocab_size) { candidates_.reserve(static_cast<size_t>(vocab_size)); }

Status Sampler::check(const SamplingParams& p, int64_t vocab_size) {
  // Negated comparisons, so that NaN is refused too.
  if (!(p.temperature >= 0 && p.temperature <= 100)) {
    return out_of_range("temperature", p.temperature, "between 0 and 100");
  }
  if (p.top_k < 0) {
    return out_of_range("top_k", static_cast<double>(p.top_k), "0 (off) or positive");
  }
  if (!(p.top_p > 0 && p.top_p <= 1)) {
    return out_of_range("top_p", p.top_p, "above 0 and at most 1");
  }
  if (!(p.min_p >= 0 && p.min_p <= 1)) {
    return out_of_range("min_p", p.min_p, "between 0 and 1");
  }
  if (!(p.repetition_penalty > 0 && p.repetition_penalty <= 100)) {
    return out_of_range("repetition_penalty", p.repetition_penalty, "above 0 and at most 100");
  }
  if (!(std::abs(p.presence_penalty) <= 100)) {
    return out_of_range("presence_penalty", p.presence_penalty, "between -100 and 100");
  }
  if (!(std::abs(p.frequency_penalty) <= 100)) {
    return out_of_range("frequency_penalty", p.frequency_penalty, "between -100 and 100");
  }
  for (const int32_t token : p.allowed_tokens) {
    if (token < 0 || token >= vocab_size) {
      return make_error(StatusCode::kInvalidArgument,
                        "allowed_tokens has token {}, but the vocabulary has {} tokens", token,
                        vocab_size);
    }
  }
  for (const auto& [token, bias] : p.logit_bias) {
    if (token < 0 || token >= vocab_size) {
      return make_error(StatusCode::kInvalidArgument,
                        "logit_bias names token {}, but the vocabulary has {} tokens", token,
                        vocab_size);
    }
    if (!(std::abs(bias) <= 1000)) {
      return out_of_range("logit_bias", bias, "between -1000 and 1000");
    }
  }
  return {};
}

bool Sampler::needs_seen(const SamplingParams& p) {
  return p.repetition_penalty != 1 || p.presence_penalty != 0 || p.frequency_penalty != 0;
}

Result<SampledToken> Sampler::sample(std::span<float> logits, const SamplerInput& input) {
  if (!all_finite(logits)) {
    return not_finite_logits();
  }
  SampledToken out;
  double log_sum = 0;
  if (input.top_logprobs >= 0) {
    log_sum = take_top(logits, input.top_logprobs, out.top_logprobs);
    raw_.assign(logits.begin(), logits.end());
  }
  apply_bias_and_penalties(logits, input);
  for (const int32_t token : input.banned) {
    logits[static_cast<size_t>(token)] = kMinusInfinity;
  }
  if (!input.params.allowed_tokens.empty()) {
    keep_allowed(logits, input.params.allowed_tokens);
  }
  if (!input.mask.empty()) {
    apply_mask(logits, input.mask);
  }
  out.token = argmax(logits);
  const float largest = logits[static_cast<size_t>(out.token)];
  if (!std::isfinite(largest)) {
    return no_token_left();
  }
  if (input.params.temperature != 0) {
    out.token = draw(logits, largest, input);
  }
  if (input.top_logprobs >= 0) {
    out.logprob = static_cast<float>(raw_[static_cast<size_t>(out.token)] - log_sum);
  }
  return out;
}

Result<ScoredToken> Sampler::score(std::span<const float> logits, int32_t token, int count) {
  if (!all_finite(logits)) {
    return not_finite_logits();
  }
  ScoredToken out{.token = token};
  const double log_sum = take_top(logits, count, out.top_logprobs);
  const float own = logits[static_cast<size_t>(token)];
  const auto before = logits.first(static_cast<size_t>(token));  // of equals the smaller id leads
  out.logprob = static_cast<float>(own - log_sum);
  out.rank =
      static_cast<int32_t>(1 + std::ranges::count_if(logits, [&](float x) { return x > own; }) +
                           std::ranges::count_if(before, [&](float x) { return x == own; }));
  return out;
}

// The `count` most likely tokens of softmax(logits); returns log(sum(exp(logits))).
double Sampler::take_top(std::span<const float> logits, int count, std::vector<TokenLogprob>& out) {
  const float largest = logits[static_cast<size_t>(argmax(logits))];
  double sum = 0;
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    sum += std::exp(static_cast<double>(logits[i] - largest));
    candidates_.push_back({logits[i], static_cast<int32_t>(i), 0});
  }
  const double log_sum = largest + std::log(sum);
  const auto end = candidates_.begin() + std::min<ptrdiff_t>(count, std::ssize(candidates_));
  std::partial_sort(candidates_.begin(), end, candidates_.end(), more_likely);
  for (auto it = candidates_.begin(); it != end; ++it) {
    out.push_back({it->token, static_cast<float>(it->logit - log_sum)});
  }
  return log_sum;
}

int32_t Sampler::draw(std::span<const float> logits, float largest, const SamplerInput& input) {
  const SamplingParams& params = input.params;
  const auto inverse = inverse_temperature(params.temperature);
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (const float weight = std::exp((logits[i] - largest) * inverse); weight > 0) {
      candidates_.push_back({logits[i], static_cast<int32_t>(i), weight});
    }
  }
  if (params.top_k > 0) {
    keep_top_k(params.top_k);
  }
  if (params.top_p < 1) {
    keep_top_p(params.top_p);
  }
  // The most likely candidate is always left and has weight 1.
  const auto min_weight = static_cast<float>(params.min_p);
  std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < min_weight; });
  double sum = 0;
  for (const Candidate& c : candidates_) {
    sum += c.weight;
  }
  const double target = draw_uniform(input.seed, input.step) * sum;
  double passed = 0;
  for (const Candidate& c : candidates_) {
    passed += c.weight;
    if (passed > target) {
      return c.token;
    }
  }
  return candidates_.back().token;  // rounding
}

void Sampler::keep_top_k(int64_t k) {
  if (k >= std::ssize(candidates_)) {
    return;
  }
  std::nth_element(candidates_.begin(), candidates_.begin() + k, candidates_.end(), more_likely);
  candidates_.resize(static_cast<size_t>(k));
  std::sort(candidates_.begin(), candidates_.end(), more_likely);
}

// Keeps the fewest most likely candidates that have at least `p` of the weight.
void Sampler::keep_top_p(double p) {
  double sum = 0;
  for (const Candidate& c : candidates_) {
    sum += c.weight;
  }
  // A heap, because few of a large vocabulary are usually kept: cheaper than sorting it.
  std::make_heap(candidates_.begin(), candidates_.end(), less_likely);
  auto kept = candidates_.end();
  double passed = 0;
  while (kept != candidates_.begin() && passed < p * sum) {
    std::pop_heap(candidates_.begin(), kept, less_likely);
    --kept;
    passed += kept->weight;
  }
  candidates_.erase(candidates_.begin(), kept);
  std::reverse(candidates_.begin(), candidates_.end());
}

}  // namespace nibble
