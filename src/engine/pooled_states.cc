#include "engine/pooled_states.h"

#include <algorithm>
#include <cmath>

#include "ops/sampler.h"

namespace nibble {

Status add_states(std::span<const float> states, size_t width, std::vector<double>& sum) {
  sum.resize(width);
  for (; !states.empty(); states = states.subspan(width)) {
    for (size_t i = 0; i < width; ++i) {
      sum[i] += states[i];
    }
  }
  // A sum of finite floats is finite, and one with anything else is not.
  const bool finite = std::ranges::all_of(sum, [](double x) { return std::isfinite(x); });
  return finite ? Status() : not_finite_logits();
}

std::vector<float> pooled_prompt(const Sequence& sequence) {
  if (sequence.pooled_tokens < sequence.prompt_tokens) {
    return {};
  }
  const double count = sequence.request.pooling == Pooling::kMean
                           ? static_cast<double>(sequence.prompt_tokens)
                           : 1.0;
  std::vector<float> out(sequence.pooled.size());
  std::ranges::transform(sequence.pooled, out.begin(),
                         [&](double sum) { return static_cast<float>(sum / count); });
  return out;
}

}  // namespace nibble
