#include "model/experts_loader.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "arch/family.h"

namespace nibble {
namespace {

/// One layer's experts on their way from the file to the backend.
class ExpertsLoader final {
 public:
  ExpertsLoader(const ExpertsSource& source, int64_t layer)
      : source_(source),
        config_(source.config),
        moe_(source.config.moe),
        layer_(layer),
        first_(source.share.first(moe_.experts)),
        count_(source.share.count(moe_.experts)) {}

  Result<std::unique_ptr<PreparedExperts>> load() {
    NIBBLE_RETURN_IF_ERROR(read_router());
    NIBBLE_RETURN_IF_ERROR(read_experts());
    NIBBLE_RETURN_IF_ERROR(read_biases());
    ExpertsForm form{.router = moe_.router,
                     .top_k = moe_.experts_per_token,
                     .activation = config_.activation,
                     .limit = moe_.limit,
                     .act = act_};
    settle_down_acts(form);
    auto experts =
        source_.backend.prepare_experts({.experts = experts_,
                                         .first_expert = first_,
                                         .form = std::move(form),
                                         .router = router_.weight,
                                         .router_bias = router_bias_,
                                         .correction = correction_,
                                         .gate_up_bias = gate_up_bias_,
                                         .down_bias = down_bias_,
                                         .between = source_.backend.activation_type(config_.dtype),
                                         .max_m = source_.max_rows});
    source_.weights.release(parts_);
    return experts.ok() ? std::move(experts)
                        : experts.status().with_context(name(Role::kRouter) + " and its experts");
  }

 private:
  [[nodiscard]] std::string name(Role role, int64_t expert = 0) const {
    return module_name(*config_.family, role, layer_, expert);
  }

  Status read_router() {
    NIBBLE_ASSIGN_OR_RETURN(
        router_, source_.weights.linear(name(Role::kRouter), moe_.experts, config_.hidden_size));
    if (router_.weight.format.quantized()) {
      return make_error(StatusCode::kUnsupported,
                        "{}: a quantized router does not run, as rounding it changes which experts "
                        "are chosen; quantize the checkpoint again: nibble quantize keeps routers",
                        router_.weight.name);
    }
    if (moe_.biases) {
      NIBBLE_RETURN_IF_ERROR(
          source_.weights.append_bias(name(Role::kRouter), moe_.experts, router_bias_));
    }
    if (moe_.correction) {
      NIBBLE_ASSIGN_OR_RETURN(correction_,
                              source_.weights.vector(name(Role::kRouterCorrection), moe_.experts));
    }
    return {};
  }

  /// Notes a projection of an expert. Gate and up of all read the same rows; what each down reads
  /// is the expert's own, but in one format.
  Result<QuantView> take(Role role, int64_t expert, MappedLinear& part) {
    source_.note(part);  // as the file has it
    part.act.format = activations_of(part, config_.dtype);
    if (role == Role::kExpertDown) {
      down_acts_.push_back(part.act);
    } else if (expert == first_ && role == Role::kExpertGate) {
      act_ = part.act;
    }
    const bool alike =
        role == Role::kExpertDown ? part.act.format == down_acts_.front().format : part.act == act_;
    if (!alike) {
      return make_error(
          StatusCode::kUnsupported,
          "{}: the activations of expert {} are rounded otherwise than those of the "
          "first of its layer; quantize the checkpoint again: nibble quantize SRC DST "
          "--scheme NAME",
          part.weight.name, expert);
    }
    return part.weight;
  }

  /// The form of down's rows, alone where all have it.
  void settle_down_acts(ExpertsForm& form) const {
    form.down_act = down_acts_.front();
    const bool one =
        std::ranges::all_of(down_acts_, [&](const ActSpec& act) { return act == form.down_act; });
    if (!one) {
      form.down_acts = down_acts_;
    }
  }

  Status read_experts() {
    const int64_t hidden = config_.hidden_size;
    std::vector<WeightLoader::ExpertModule> modules;
    for (int64_t expert = first_; expert < first_ + count_; ++expert) {
      modules.push_back({name(Role::kExpertGate, expert), moe_.width, hidden});
      modules.push_back({name(Role::kExpertUp, expert), moe_.width, hidden});
      modules.push_back({name(Role::kExpertDown, expert), hidden, moe_.width});
    }
    NIBBLE_ASSIGN_OR_RETURN(parts_, source_.weights.experts(modules));
    for (int64_t expert = first_; expert < first_ + count_; ++expert) {
      MappedLinear* parts = parts_.data() + 3 * (expert - first_);
      ExpertsRequest::Expert views;
      NIBBLE_ASSIGN_OR_RETURN(views.gate, take(Role::kExpertGate, expert, parts[0]));
      NIBBLE_ASSIGN_OR_RETURN(views.up, take(Role::kExpertUp, expert, parts[1]));
      NIBBLE_ASSIGN_OR_RETURN(views.down, take(Role::kExpertDown, expert, parts[2]));
      experts_.push_back(std::move(views));
    }
    return {};
  }

  Status read_biases() {
    if (!moe_.biases) {
      return {};
    }
    NIBBLE_ASSIGN_OR_RETURN(
        std::vector<float> stored,
        source_.weights.numbers(name(Role::kExpertsGateUpBias), {moe_.experts, 2 * moe_.width}));
    NIBBLE_ASSIGN_OR_RETURN(
        down_bias_,
        source_.weights.numbers(name(Role::kExpertsDownBias), {moe_.experts, config_.hidden_size}));
    const bool in_turns = config_.family->fused && config_.family->fused->interleaved;
    gate_up_bias_ = in_turns ? in_halves(stored) : std::move(stored);
    keep_own(gate_up_bias_);
    keep_own(down_bias_);
    return {};
  }

  /// Of numbers of all experts those of the ones that are loaded.
  void keep_own(std::vector<float>& numbers) const {
    const auto of_expert = std::ssize(numbers) / moe_.experts;
    numbers = {numbers.begin() + first_ * of_expert,
               numbers.begin() + (first_ + count_) * of_expert};
  }

  /// Numbers of gate and up in turns, as gate's and then up's of each expert.
  [[nodiscard]] std::vector<float> in_halves(const std::vector<float>& stored) const {
    std::vector<float> halves;
    halves.reserve(stored.size());
    for (size_t expert = 0; expert < stored.size(); expert += 2 * static_cast<size_t>(moe_.width)) {
      for (size_t half = 0; half < 2; ++half) {
        for (size_t i = 0; i < static_cast<size_t>(moe_.width); ++i) {
          halves.push_back(stored[expert + 2 * i + half]);
        }
      }
    }
    return halves;
  }

  const ExpertsSource& source_;
  const ModelConfig& config_;
  const MoeConfig& moe_;
  const int64_t layer_;
  const int64_t first_;  // expert that is loaded
  const int64_t count_;
  MappedLinear router_;
  std::vector<float> router_bias_;
  std::vector<float> correction_;
  std::vector<MappedLinear> parts_;
  std::vector<ExpertsRequest::Expert> experts_;
  ActSpec act_;
  std::vector<ActSpec> down_acts_;  // of each expert
  std::vector<float> gate_up_bias_;
  std::vector<float> down_bias_;
};

}  // namespace

Result<std::unique_ptr<PreparedExperts>> load_experts(const ExpertsSource& source, int64_t layer) {
  return ExpertsLoader(source, layer).load();
}

}  // namespace nibble
