#include <algorithm>

#include "arch/family.h"

namespace nibble {

Status read_qwen_experts(const Json& json, const JsonReader& reader, ModelConfig& config) {
  MoeConfig& moe = config.moe;
  NIBBLE_ASSIGN_OR_RETURN(moe.experts, read_count(reader, "num_experts"));
  NIBBLE_ASSIGN_OR_RETURN(moe.experts_per_token, read_count(reader, "num_experts_per_tok", 8));
  NIBBLE_ASSIGN_OR_RETURN(moe.width, read_count(reader, "moe_intermediate_size"));
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
