#include "engine/sampling_builder.h"

#include <algorithm>
#include <limits>

namespace nibble {

void SamplingBuilder::clear() {
  rows_.clear();
  edits_.clear();
  limited_ = false;
  clear_masks();
}

void SamplingBuilder::clear_masks() {
  mask_of_.clear();
  masks_.clear();
  mask_count_ = 0;
}

void SamplingBuilder::add_mask(std::span<const uint32_t> mask) {
  mask_of_.push_back(mask.empty() ? -1 : mask_count_++);
  masks_.insert(masks_.end(), mask.begin(), mask.end());
}

void SamplingBuilder::add(const SamplerInput& input) {
  const SamplingParams& params = input.params;
  const auto row = static_cast<int32_t>(rows_.size());
  const size_t first = edits_.size();
  const bool greedy = params.temperature == 0;
  limited_ = limited_ || !params.allowed_tokens.empty();
  rows_.push_back(
      {.seed = input.seed,
       .step = input.step,
       .top_p = params.top_p,
       .inverse_temperature = greedy ? 0.0F : Sampler::inverse_temperature(params.temperature),
       .min_p = static_cast<float>(params.min_p),
       .top_k = static_cast<int32_t>(
           std::min<int64_t>(params.top_k, std::numeric_limits<int32_t>::max())),
       .logprobs = input.top_logprobs});
  for (const auto& [token, bias] : params.logit_bias) {
    edits_.push_back({.row = row, .token = token, .bias = bias});
  }
  if (Sampler::needs_seen(params)) {
    for (const auto& [token, count] : input.seen) {
      const double penalty =
          count > 0 ? params.presence_penalty + params.frequency_penalty * count : 0.0;
      edits_.push_back({.row = row,
                        .token = token,
                        .repetition = static_cast<float>(params.repetition_penalty),
                        .penalty = static_cast<float>(penalty)});
    }
  }
  for (const int32_t token : input.banned) {
    edits_.push_back({.row = row, .token = token, .bias = -std::numeric_limits<float>::infinity()});
  }
  merge_edits(first);
}

// One edit for each token of a row.
void SamplingBuilder::merge_edits(size_t first) {
  const auto begin = edits_.begin() + static_cast<std::ptrdiff_t>(first);
  std::sort(begin, edits_.end(),
            [](const LogitEdit& a, const LogitEdit& b) { return a.token < b.token; });
  auto last = begin;
  for (auto it = begin; it != edits_.end(); ++it) {
    if (it == begin) {
      continue;
    }
    if (it->token == last->token) {
      last->bias += it->bias;
      last->repetition *= it->repetition;
      last->penalty += it->penalty;
    } else {
      *++last = *it;
    }
  }
  if (begin != edits_.end()) {
    edits_.erase(last + 1, edits_.end());
  }
}

Result<SampledToken> SamplingBuilder::result(const SampledRow& row, int top_logprobs) {
  if (row.status == SampleStatus::kNotFinite) {
    return not_finite_logits();
  }
  if (row.status == SampleStatus::kNoneLeft) {
    return no_token_left();
  }
  SampledToken out{.token = row.token};
  if (top_logprobs >= 0) {
    out.logprob = row.logprob;
    for (int i = 0; i < top_logprobs; ++i) {
      const TopLogprob& top = row.top.at(static_cast<size_t>(i));
      if (top.token >= 0) {
        out.top_logprobs.push_back({top.token, top.logprob});
      }
    }
  }
  return out;
}

}  // namespace nibble
