#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "base/check.h"
#include "base/f16.h"
#include "ops/experts.h"
#include "ops/gemm.h"
#include "ops/route.h"

namespace nibble {
namespace {

std::vector<double> softmax_of(const std::vector<double>& x) {
  const double top = *std::ranges::max_element(x);
  std::vector<double> out;
  double sum = 0.0;
  for (const double value : x) {
    out.push_back(std::exp(value - top));
    sum += out.back();
  }
  for (double& value : out) {
    value /= sum;
  }
  return out;
}

/// Indices of `values`, largest first.
std::vector<size_t> sorted(const std::vector<double>& values) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, [&](size_t a, size_t b) { return values[a] > values[b]; });
  return order;
}

void keep_best_groups(const RouterForm& form, std::vector<double>& choice) {
  const size_t size = choice.size() / static_cast<size_t>(form.groups);
  std::vector<double> sums;
  for (size_t begin = 0; begin < choice.size(); begin += size) {
    std::vector<double> group(choice.begin() + static_cast<std::ptrdiff_t>(begin),
                              choice.begin() + static_cast<std::ptrdiff_t>(begin + size));
    std::ranges::sort(group, std::greater<>());
    sums.push_back(group[0] + group[1]);
  }
  const std::vector<size_t> order = sorted(sums);
  for (size_t i = static_cast<size_t>(form.kept_groups); i < order.size(); ++i) {
    for (size_t e = order[i] * size; e < (order[i] + 1) * size; ++e) {
      choice[e] = -std::numeric_limits<double>::infinity();
    }
  }
}

/// Results of a product for one row, with the bias of `expert`.
std::vector<float> product(const QuantTensor& weight,
                           const ActSpec& act,
                           const std::vector<float>& x,
                           const std::vector<float>& bias,
                           size_t expert) {
  std::vector<float> y(static_cast<size_t>(weight.n));
  const float* added = bias.empty() ? nullptr : bias.data() + expert * y.size();
  reference_gemm(weight, act,
                 {.x = x.data(),
                  .x_stride = weight.k,
                  .m = 1,
                  .y = y.data(),
                  .y_stride = weight.n,
                  .bias = added});
  return y;
}

std::vector<float> row_of(const ExpertArgs& args, int64_t row, int64_t width) {
  std::vector<float> x;
  for (int64_t i = 0; i < width; ++i) {
    const ConstActivations at = args.x.at(row * args.x_stride + i);
    x.push_back(at.type == DType::kF32 ? *static_cast<const float*>(at.data)
                                       : bf16_to_f32(*static_cast<const uint16_t*>(at.data)));
  }
  return x;
}

}  // namespace

void reference_route(const RouteArgs& args) {
  const std::vector<double> logits(args.logits.begin(), args.logits.end());
  std::vector<double> scores = logits;
  if (args.form.scores == RouterScores::kSoftmax) {
    scores = softmax_of(logits);
  } else if (args.form.scores == RouterScores::kSigmoid) {
    std::ranges::transform(logits, scores.begin(),
                           [](double x) { return 1.0 / (1.0 + std::exp(-x)); });
  }
  std::vector<double> choice = scores;
  for (size_t i = 0; i < args.correction.size(); ++i) {
    choice[i] += args.correction[i];
  }
  if (args.form.groups > args.form.kept_groups) {
    keep_best_groups(args.form, choice);
  }
  const std::vector<size_t> order = sorted(choice);
  std::vector<double> weights;
  for (size_t i = 0; i < args.chosen.size(); ++i) {
    args.chosen[i] = static_cast<int32_t>(order[i]);
    weights.push_back(scores[order[i]]);
  }
  if (args.form.scores == RouterScores::kSoftmaxOfChosen) {
    weights = softmax_of(weights);
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t i = 0; i < weights.size(); ++i) {
    const double divisor =
        args.form.renormalise ? sum + static_cast<double>(args.form.epsilon) : 1.0;
    args.weights[i] = static_cast<float>(weights[i] / divisor * args.form.factor);
  }
}

void reference_experts(const ReferenceExperts& experts, const ExpertArgs& args) {
  const ExpertsForm& form = experts.form;
  const int64_t hidden = experts.router.k;
  const auto top_k = static_cast<size_t>(form.top_k);
  for (int64_t row = 0; row < args.m; ++row) {
    const std::vector<float> x = row_of(args, row, hidden);
    const std::vector<float> logits =
        product(experts.router, ActFormat::kFloat, x, experts.router_bias, 0);
    std::vector<int32_t> chosen(top_k);
    std::vector<float> weights(top_k);
    reference_route({.logits = logits,
                     .correction = experts.correction,
                     .form = form.router,
                     .chosen = chosen,
                     .weights = weights});
    std::vector<double> sum(static_cast<size_t>(hidden));
    for (size_t i = 0; i < top_k; ++i) {
      const auto expert = static_cast<size_t>(chosen[i]);
      std::vector<float> gate_up =
          product(experts.gate_up[expert], form.act, x, experts.gate_up_bias, expert);
      if (experts.between == DType::kBF16) {
        std::ranges::transform(gate_up, gate_up.begin(),
                               [](float value) { return bf16_to_f32(f32_to_bf16(value)); });
      }
      const size_t width = gate_up.size() / 2;
      std::vector<float> activated;
      for (size_t j = 0; j < width; ++j) {
        activated.push_back(static_cast<float>(
            exact_activation(form.activation, gate_up[j], gate_up[width + j], form.limit)));
      }
      const std::vector<float> y = product(experts.down[expert], form.down_act_of(expert),
                                           activated, experts.down_bias, expert);
      for (size_t j = 0; j < y.size(); ++j) {
        sum[j] += static_cast<double>(weights[i]) * y[j];
      }
    }
    for (size_t j = 0; j < sum.size(); ++j) {
      float& y = args.y[row * args.y_stride + static_cast<int64_t>(j)];
      y += static_cast<float>(sum[j]);
      y += args.beside != nullptr ? args.beside[row * hidden + static_cast<int64_t>(j)] : 0.0F;
    }
  }
}

}  // namespace nibble
