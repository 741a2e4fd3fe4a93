#include "bench/moe/expert_layer.h"

#include <algorithm>
#include <array>
#include <random>
#include <utility>

#include <fmt/format.h>

#include "bench/kernels/random_weight.h"
#include "bench/moe/steering.h"
#include "ops/route.h"

namespace nibble {

namespace {

constexpr int64_t kSizeUnit = 32;  // that kernels of every device take

constexpr std::array kShapes = {
    MoeShape{.name = "gpt-oss-20b",
             .experts = 32,
             .all_experts = 32,
             .top_k = 4,
             .hidden = 2880,
             .width = 2880,
             .router = {.scores = RouterScores::kSoftmaxOfChosen},
             .activation = GemmInput::Kind::kClampedSwiglu,
             .limit = 7.0F,
             .biases = true},
    MoeShape{.name = "kimi-k2-ep8",
             .experts = 48,
             .all_experts = 384,
             .top_k = 8,
             .hidden = 7168,
             .width = 2048,
             .router = {.scores = RouterScores::kSigmoid,
                        .renormalise = true,
                        .epsilon = 1e-20F,
                        .factor = 2.827F},
             .correction = true},
    MoeShape{.name = "qwen3-30b-a3b",
             .experts = 128,
             .all_experts = 128,
             .top_k = 8,
             .hidden = 2048,
             .width = 768},
};

std::vector<float> random_biases(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, 0.1F);
  std::vector<float> biases(static_cast<size_t>(count));
  std::ranges::generate(biases, [&] { return normal(random); });
  return biases;
}

}  // namespace

int64_t MoeShape::rows_of(int64_t m) const {
  return experts == all_experts ? m : std::max<int64_t>(1, m * experts / all_experts);
}

std::string MoeShape::rows_note() const {
  if (experts == all_experts) {
    return {};
  }
  return fmt::format(
      "m counts the rows of all devices. This one has {} of {} experts; as no run leaves out the "
      "choices of others, it computes max(1, m * {} / {}) rows with {} of its own experts each, "
      "which are as many slots as it has on the average.",
      experts, all_experts, experts, all_experts, top_k);
}

Result<MoeShape> find_moe_shape(std::string_view name) {
  const auto found = std::ranges::find(kShapes, name, &MoeShape::name);
  if (found == kShapes.end()) {
    return make_error(
        StatusCode::kInvalidArgument,
        "unknown layer \"{}\"; choose one of {}, or give --experts, --top-k, --hidden "
        "and --width",
        name, moe_shape_names());
  }
  return *found;
}

std::string moe_shape_names() {
  std::string names;
  for (const MoeShape& shape : kShapes) {
    names += (names.empty() ? "" : ", ") + std::string(shape.name);
  }
  return names;
}

Status check_moe_shape(const MoeShape& shape) {
  if (shape.experts > kMostExperts || shape.top_k > shape.experts) {
    return make_error(
        StatusCode::kInvalidArgument,
        "--top-k {} --experts {}: a row takes at most all experts, and a layer has at "
        "most {}",
        shape.top_k, shape.experts, kMostExperts);
  }
  if (shape.hidden % kSizeUnit != 0 || shape.width % kSizeUnit != 0) {
    return make_error(StatusCode::kInvalidArgument, "--hidden {} --width {}: give multiples of {}",
                      shape.hidden, shape.width, kSizeUnit);
  }
  if (shape.hidden < shape.experts) {
    return make_error(StatusCode::kInvalidArgument,
                      "--hidden {} --experts {}: the router reads one column of a row for each "
                      "expert; give at least as many columns as experts",
                      shape.hidden, shape.experts);
  }
  return {};
}

Result<MoeWeights> MoeWeights::create(const MoeShape& shape, const QuantScheme& scheme) {
  MoeWeights weights;
  constexpr double kA4Share = 0.75;  // of schemes with activations in blocks
  weights.form_ = {.router = shape.router,
                   .top_k = shape.top_k,
                   .activation = shape.activation,
                   .limit = shape.limit,
                   .act = bench_act(scheme, shape.hidden, kA4Share),
                   .down_act = bench_act(scheme, shape.width, kA4Share)};
  NIBBLE_ASSIGN_OR_RETURN(weights.router_, steering_router(shape.experts, shape.hidden));
  const WeightFormat& format = scheme.weight;
  NIBBLE_ASSIGN_OR_RETURN(weights.gate_, random_weight(format, shape.width, shape.hidden, 1));
  NIBBLE_ASSIGN_OR_RETURN(weights.up_, random_weight(format, shape.width, shape.hidden, 2));
  NIBBLE_ASSIGN_OR_RETURN(weights.down_, random_weight(format, shape.hidden, shape.width, 3));
  ExpertsRequest::Expert expert{view_of(weights.gate_), view_of(weights.up_),
                                view_of(weights.down_)};
  expert.gate.name = fmt::format("experts of {} in {}", shape.name, scheme.name);
  expert.up.name = expert.gate.name;
  expert.down.name = expert.gate.name;
  weights.experts_.assign(static_cast<size_t>(shape.experts), expert);
  if (shape.biases) {
    weights.router_bias_ = random_biases(shape.experts, 4);
    weights.gate_up_bias_ = random_biases(shape.experts * 2 * shape.width, 5);
    weights.down_bias_ = random_biases(shape.experts * shape.hidden, 6);
  }
  if (shape.correction) {
    weights.correction_.assign(static_cast<size_t>(shape.experts), 0.0F);
  }
  return weights;
}

ExpertsRequest MoeWeights::request(int64_t max_m) const {
  return {.experts = experts_,
          .form = form_,
          .router = view_of(router_),
          .router_bias = router_bias_,
          .correction = correction_,
          .gate_up_bias = gate_up_bias_,
          .down_bias = down_bias_,
          .between = DType::kBF16,
          .max_m = max_m};
}

}  // namespace nibble
