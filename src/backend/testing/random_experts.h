#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "backend/prepared_experts.h"
#include "backend/testing/random_blocks.h"
#include "backend/testing/random_gemm.h"
#include "core/expert_share.h"
#include "quant/scheme.h"

namespace nibble {

/// Sizes of a layer of experts.
struct ExpertsShape {
  int64_t experts;
  int64_t top_k;
  int64_t hidden;
  int64_t width;
};

/// A layer of random experts, as the oracle and as a backend see it.
struct RandomExperts {
  ReferenceExperts weights;
  std::vector<ExpertsRequest::Expert> views;

  RandomExperts(const QuantScheme& scheme, const ExpertsShape& shape, DType between) {
    const auto act = [&](int64_t k) {
      const bool bf16 = scheme.act == ActFormat::kFloat && between == DType::kBF16;
      return bf16 ? ActSpec(ActFormat::kBf16) : random_act(scheme, k, 7);
    };
    weights.form = {.top_k = shape.top_k, .act = act(shape.hidden), .down_act = act(shape.width)};
    weights.between = between;
    const WeightFormat router{between == DType::kBF16 ? WeightCode::kBf16 : WeightCode::kF32,
                              ScalePer::kNone};
    weights.router = random_weight(router, {shape.experts, shape.hidden}, 1).value();
    for (int64_t e = 0; e < shape.experts; ++e) {
      const auto seed = static_cast<uint32_t>(10 + 3 * e);
      weights.gate_up.push_back(
          random_weight(scheme.weight, {2 * shape.width, shape.hidden}, seed).value());
      weights.down.push_back(
          random_weight(scheme.weight, {shape.hidden, shape.width}, seed + 1).value());
    }
  }

  /// Rows enter each expert's down in blocks and in an order of its own.
  void mix_down_acts(const QuantScheme& scheme) {
    const auto width = static_cast<size_t>(weights.down.front().k);
    for (size_t e = 0; e < weights.down.size(); ++e) {
      const auto seed = static_cast<uint32_t>(70 + e);
      ActSpec act = scheme.act == ActFormat::kFloat
                        ? weights.form.down_act
                        : random_act(scheme, static_cast<int64_t>(width), seed);
      std::vector<int32_t> columns(width);
      std::iota(columns.begin(), columns.end(), 0);
      std::shuffle(columns.begin(), columns.end(), std::mt19937(seed));
      act.columns = std::make_shared<const std::vector<int32_t>>(std::move(columns));
      weights.form.down_acts.push_back(std::move(act));
    }
  }

  void add_biases() {
    const auto experts = static_cast<int64_t>(weights.down.size());
    weights.router_bias = random_floats(experts, 2);
    weights.gate_up_bias = random_floats(experts * weights.gate_up[0].n, 3);
    weights.down_bias = random_floats(experts * weights.down[0].n, 4);
  }

  [[nodiscard]] ExpertsRequest request(int64_t max_m) {
    views.clear();
    for (size_t e = 0; e < weights.down.size(); ++e) {
      const QuantView both = view_of(weights.gate_up[e]);
      QuantView gate = both;
      gate.n = both.n / 2;
      QuantView up = gate;
      up.codes = both.code_row(gate.n);
      const int64_t numbers = gate.n * gate.format.groups(gate.k);
      if (gate.scales != nullptr) {
        up.scales = both.scales + numbers * dtype_bits(both.scale_type) / 8;
      }
      up.zeros = both.zeros == nullptr ? nullptr : both.zeros + numbers;
      views.push_back({gate, up, view_of(weights.down[e])});
    }
    return {.experts = views,
            .form = weights.form,
            .router = view_of(weights.router),
            .router_bias = weights.router_bias,
            .correction = weights.correction,
            .gate_up_bias = weights.gate_up_bias,
            .down_bias = weights.down_bias,
            .between = weights.between,
            .max_m = max_m};
  }
};

/// The part of a layer that one of several devices has.
inline ExpertsRequest share_of(ExpertsRequest request, const ExpertShare& share) {
  const auto all = std::ssize(request.experts);
  const auto first = static_cast<size_t>(share.first(all));
  const auto count = static_cast<size_t>(share.count(all));
  const auto part = [&](std::span<const float> numbers) {
    const size_t each = numbers.size() / static_cast<size_t>(all);
    return numbers.subspan(first * each, count * each);
  };
  request.experts = request.experts.subspan(first, count);
  request.first_expert = share.first(all);
  if (std::vector<ActSpec>& acts = request.form.down_acts; !acts.empty()) {
    acts = {acts.begin() + request.first_expert,
            acts.begin() + request.first_expert + static_cast<int64_t>(count)};
  }
  request.gate_up_bias = part(request.gate_up_bias);
  request.down_bias = part(request.down_bias);
  return request;
}

/// Of y, which held 1 everywhere before the experts were added.
inline double relative_error(const std::vector<float>& got, const std::vector<float>& expected) {
  double squares = 0.0;
  double all = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    squares += std::pow(static_cast<double>(got[i]) - expected[i], 2);
    all += std::pow(static_cast<double>(expected[i]) - 1.0, 2);
  }
  return std::sqrt(squares / all);
}

}  // namespace nibble
