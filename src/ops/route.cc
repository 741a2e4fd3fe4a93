#include "ops/route.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/check.h"

namespace nibble {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

/// exp(x - top) of each, divided by their sum; all NaN where a number is.
void softmax(std::span<const float> x, std::span<float> out) {
  const float top =
      std::accumulate(x.begin(), x.end(), kLowest, [](float a, float b) { return a < b ? b : a; });
  std::ranges::transform(x, out.begin(), [&](float value) { return std::exp(value - top); });
  const float sum = std::accumulate(out.begin(), out.end(), 0.0F);
  std::ranges::transform(out, out.begin(), [&](float value) { return value / sum; });
}

/// The index of the largest number, the first of equals; numbers may be -inf.
size_t best_of(std::span<const float> values) {
  return static_cast<size_t>(std::ranges::max_element(values) - values.begin());
}

/// Sets the scores of all groups but the best to -inf.
void drop_groups(const RouterForm& form, std::span<float> scores) {
  const size_t groups = static_cast<size_t>(form.groups);
  const size_t size = scores.size() / groups;
  std::array<float, kMostExperts> sums;  // of the two largest of a group
  for (size_t g = 0; g < groups; ++g) {
    float first = kLowest;
    float second = kLowest;
    for (const float score : scores.subspan(g * size, size)) {
      second = score > first ? first : std::max(second, score);
      first = std::max(first, score);
    }
    sums[g] = first + second;
  }
  std::array<bool, kMostExperts> kept{};
  for (int32_t i = 0; i < form.kept_groups; ++i) {
    const size_t best = best_of({sums.data(), groups});
    kept[best] = true;
    sums[best] = kLowest;
  }
  for (size_t g = 0; g < groups; ++g) {
    if (!kept[g]) {
      std::ranges::fill(scores.subspan(g * size, size), kLowest);
    }
  }
}

}  // namespace

void route(const RouteArgs& args) {
  const size_t experts = args.logits.size();
  const RouterForm& form = args.form;
  CHECK(experts <= kMostExperts && args.chosen.size() <= experts);
  std::array<float, kMostExperts> score_memory;
  std::array<float, kMostExperts> choice_memory;
  const std::span<float> scores(score_memory.data(), experts);
  const std::span<float> choice(choice_memory.data(), experts);
  if (form.scores == RouterScores::kSoftmax) {
    softmax(args.logits, scores);
  } else if (form.scores == RouterScores::kSigmoid) {
    std::ranges::transform(args.logits, scores.begin(),
                           [](float x) { return 1.0F / (1.0F + std::exp(-x)); });
  } else {
    std::ranges::copy(args.logits, scores.begin());
  }
  for (size_t i = 0; i < experts; ++i) {
    choice[i] = scores[i];
    if (std::isnan(choice[i])) {
      choice[i] = kLowest;
    }
  }
  for (size_t i = 0; i < args.correction.size(); ++i) {
    choice[i] += args.correction[i];
  }
  if (form.groups > form.kept_groups) {
    drop_groups(form, choice);
  }
  std::array<bool, kMostExperts> taken{};
  for (size_t i = 0; i < args.chosen.size(); ++i) {
    size_t best = experts;
    for (size_t e = 0; e < experts; ++e) {
      best = !taken[e] && (best == experts || choice[e] > choice[best]) ? e : best;
    }
    taken[best] = true;
    args.chosen[i] = static_cast<int32_t>(best);
    args.weights[i] = scores[best];
  }
  if (form.scores == RouterScores::kSoftmaxOfChosen) {
    softmax(args.weights, args.weights);
  }
  if (form.renormalise) {
    const float sum =
        std::accumulate(args.weights.begin(), args.weights.end(), 0.0F) + form.epsilon;
    std::ranges::transform(args.weights, args.weights.begin(), [&](float w) { return w / sum; });
  }
  std::ranges::transform(args.weights, args.weights.begin(),
                         [&](float w) { return w * form.factor; });
}

}  // namespace nibble
