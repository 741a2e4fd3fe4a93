#include "checkpoint/dialects/config_writers.h"

namespace nibble::quark {

// vLLM takes the length of export.kv_cache_group and iterates exclude and layer_quant_config; both
// loaders find W4A8 by the two entries of `weight`, in this order.
Json config_json(const StoredQuantization& stored) {
  const Json fp8_stage =
      Json::object({{"dtype", "fp8_e4m3"}, {"qscheme", "per_tensor"}, {"is_dynamic", false}});
  const Json int4_stage = Json::object({{"dtype", "int4"},
                                        {"qscheme", "per_channel"},
                                        {"ch_axis", 0},
                                        {"symmetric", true},
                                        {"is_dynamic", false}});
  const Json inputs =
      Json::object({{"dtype", "fp8_e4m3"}, {"qscheme", "per_tensor"}, {"is_dynamic", true}});
  const Json layers = Json::object({{"input_tensors", inputs},
                                    {"output_tensors", nullptr},
                                    {"bias", nullptr},
                                    {"weight", JsonArray{fp8_stage, int4_stage}}});
  const Json exported = Json::object({{"kv_cache_group", JsonArray{}},
                                      {"min_kv_scale", 0.0},
                                      {"pack_method", "reorder"},
                                      {"weight_format", "real_quantized"},
                                      {"weight_merge_groups", nullptr}});
  return Json::object({{"quant_method", "quark"},
                       {"global_quant_config", layers},
                       {"exclude", JsonArray(stored.ignore.begin(), stored.ignore.end())},
                       {"layer_quant_config", Json::object({})},
                       {"layer_type_quant_config", Json::object({})},
                       {"export", exported}});
}

}  // namespace nibble::quark
