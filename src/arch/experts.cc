#include <algorithm>

#include "arch/family.h"

namespace nibble {

Status check_experts_fields(const JsonReader& reader, const ModelConfig& config) {
  constexpr int64_t kMostExperts = 1024;
  const MoeConfig& moe = config.moe;
  if (!has_experts_somewhere(config)) {
    return {};
  }
  const auto corrupt = [&](std::string_view what) {
    return make_error(StatusCode::kCorrupt, "{}: {}", reader.where(), what);
  };
  if (moe.experts > kMostExperts) {
    return make_error(StatusCode::kUnsupported, "{}: {} experts; at most {} are supported",
                      reader.where(), moe.experts, kMostExperts);
  }
  if (moe.width < 1 || moe.experts_per_token < 1 || moe.experts_per_token > moe.experts) {
    return corrupt(
        fmt::format("field num_experts_per_tok: {} of {} experts of width {}; expected 1 "
                    "to all of them, and a width of at least 1",
                    moe.experts_per_token, moe.experts, moe.width));
  }
  const RouterForm& router = moe.router;
  if (router.groups < 1 || router.kept_groups < 1 || router.kept_groups > router.groups ||
      moe.experts % router.groups != 0) {
    return corrupt(
        fmt::format("fields n_group {} and topk_group {} do not fit {} experts: groups must divide "
                    "them, and some or all of the groups be kept; take the fields from the "
                    "published config.json",
                    router.groups, router.kept_groups, moe.experts));
  }
  const int64_t of_group = moe.experts / router.groups;
  if (router.groups > router.kept_groups &&
      (of_group < 2 || of_group * router.kept_groups < moe.experts_per_token)) {
    return corrupt(
        fmt::format("fields n_group {} and topk_group {}: groups of {} experts are too "
                    "small for {} experts per token",
                    router.groups, router.kept_groups, of_group, moe.experts_per_token));
  }
  return {};
}

Status read_qwen_experts(const Json& json, const JsonReader& reader, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  // Transformers 5 writes Qwen3's as num_local_experts.
  const bool renamed =
      json.find("num_experts") == nullptr && json.find("num_local_experts") != nullptr;
  NIBBLE_ASSIGN_OR_RETURN(moe.experts,
                          read_count(reader, renamed ? "num_local_experts" : "num_experts"));
  NIBBLE_ASSIGN_OR_RETURN(moe.experts_per_token, read_count(reader, "num_experts_per_tok", 8));
  NIBBLE_ASSIGN_OR_RETURN(moe.width, read_count(reader, "moe_intermediate_size"));
  NIBBLE_ASSIGN_OR_RETURN(moe.router.renormalise, reader.optional_bool("norm_topk_prob", false));
  NIBBLE_ASSIGN_OR_RETURN(const int64_t step, read_count(reader, "decoder_sparse_step", 1));
  JsonArray dense;
  if (const Json* list = json.find("mlp_only_layers"); list != nullptr && !list->is_null()) {
    if (!list->is_array()) {
      return make_error(StatusCode::kCorrupt, "{}: field mlp_only_layers: expected a list",
                        reader.where());
    }
    dense = list->as_array();
  }
  for (int64_t layer = 0; layer < config.num_layers; ++layer) {
    const bool named = std::ranges::any_of(
        dense, [&](const Json& each) { return each.is_int() && each.as_int() == layer; });
    moe.layers.push_back(moe.experts > 0 && step > 0 && (layer + 1) % step == 0 && !named);
  }
  return {};
}

}  // namespace nibble
