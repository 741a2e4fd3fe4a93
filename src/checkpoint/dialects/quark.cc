#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dialects/dialects.h"

namespace nibble {
namespace {

using Number = QuantGroup::Number;
using Strategy = QuantGroup::Strategy;

Status read_dtype(const std::string& dtype, const std::string& where, QuantGroup& group) {
  if (dtype == "int4" || dtype == "uint4") {
    group.bits = 4;
    group.number = dtype == "int4" ? Number::kInt : Number::kUint;
  } else if (dtype == "int8") {
    group.bits = 8;
    group.number = Number::kInt;
  } else if (dtype == "fp8_e4m3" || dtype == "fp4") {
    group.bits = dtype == "fp4" ? 4 : 8;
    group.number = Number::kFloat;
  } else {
    return unsupported_at(where, fmt::format("field dtype: \"{}\" is not read", dtype));
  }
  return {};
}

// One entry: {"dtype": "int4", "qscheme": "per_channel", ...}.
Result<QuantGroup> read_stage(const Json& json, const std::string& where) {
  QuantGroup group;
  group.where = where;
  if (!json.is_object()) {
    return corrupt_at(where, "not a JSON object");
  }
  const JsonReader reader(json, where);
  NIBBLE_ASSIGN_OR_RETURN(const std::string dtype, reader.required_string("dtype"));
  NIBBLE_RETURN_IF_ERROR(read_dtype(dtype, where, group));
  NIBBLE_ASSIGN_OR_RETURN(group.symmetric, reader.optional_bool("symmetric", dtype != "uint4"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string scheme,
                          reader.optional_string("qscheme", "per_tensor"));
  if (scheme == "per_tensor" || scheme == "per_channel") {
    group.strategy = scheme == "per_tensor" ? Strategy::kTensor : Strategy::kChannel;
  } else if (scheme == "per_group") {
    group.strategy = Strategy::kGroup;
    NIBBLE_ASSIGN_OR_RETURN(group.group_size, reader.required_int("group_size"));
    if (group.group_size <= 0 || group.group_size > kMostGroup) {
      return corrupt_at(where,
                        fmt::format("field group_size: {} is no group size", group.group_size));
    }
  } else {
    return unsupported_at(where, fmt::format("field qscheme: \"{}\" is not read", scheme));
  }
  NIBBLE_ASSIGN_OR_RETURN(const int64_t axis, reader.optional_int("ch_axis", 0));
  if (group.strategy == Strategy::kChannel && axis != 0) {
    return unsupported_at(where, fmt::format("field ch_axis: {} is not read, only 0", axis));
  }
  return group;
}

// Two entries are two stages (FP8, then INT4), or NVFP4 whose second entry is about its scales.
Result<QuantGroup> read_stages(const JsonArray& list, const std::string& where) {
  if (list.size() == 1) {
    return read_stage(list[0], where + "[0]");
  }
  if (list.size() != 2) {
    return unsupported_at(where, fmt::format("{} stages are not read", list.size()));
  }
  NIBBLE_ASSIGN_OR_RETURN(QuantGroup first, read_stage(list[0], where + "[0]"));
  const JsonReader second(list[1], where + "[1]");
  NIBBLE_ASSIGN_OR_RETURN(const bool of_scales, second.optional_bool("is_scale_quant", false));
  if (of_scales) {
    return first;
  }
  NIBBLE_ASSIGN_OR_RETURN(QuantGroup last, read_stage(list[1], where + "[1]"));
  const bool known = first.number == Number::kFloat && first.bits == 8 &&
                     first.strategy == Strategy::kTensor && last.number == Number::kInt &&
                     last.bits == 4 && last.symmetric && last.strategy == Strategy::kChannel;
  if (!known) {
    return unsupported_at(
        where, "only fp8_e4m3 per_tensor followed by symmetric int4 per_channel is read");
  }
  last.progressive = true;
  return last;
}

// {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": true, ...}. Two stages of weights
// are made for INT8 activations, whatever the entry says.
Status read_activations(const Json* json, const std::string& where, QuantGroup& group) {
  StoredActivations& out = group.activations;
  if (group.progressive) {
    out.format = ActFormat::kInt8Token;
    return {};
  }
  if (is_absent(json)) {
    return {};
  }
  if (json->is_array()) {
    out.dropped = "rounding of activations in two stages";
    return {};
  }
  out.where = where;
  const JsonReader reader(*json, where);
  NIBBLE_ASSIGN_OR_RETURN(const std::string dtype, reader.required_string("dtype"));
  NIBBLE_ASSIGN_OR_RETURN(const bool dynamic, reader.optional_bool("is_dynamic", false));
  NIBBLE_ASSIGN_OR_RETURN(const std::string scheme,
                          reader.optional_string("qscheme", "per_tensor"));
  NIBBLE_ASSIGN_OR_RETURN(const bool symmetric, reader.optional_bool("symmetric", true));
  if (dtype == "fp4") {
    out.dropped = "rounding of activations to 4-bit floats";
  } else if ((dtype != "int8" && dtype != "fp8_e4m3") || !symmetric || scheme == "per_group" ||
             (scheme != "per_tensor" && !dynamic)) {
    out.unknown = fmt::format("input_tensors of dtype \"{}\", qscheme \"{}\"{}", dtype, scheme,
                              symmetric ? "" : " with zero points");
  } else {
    out.format = dtype == "int8" ? ActFormat::kInt8Token : ActFormat::kFp8Token;
    out.scale = dynamic ? StoredActivations::Scale::kDynamic : StoredActivations::Scale::kStatic;
  }
  return {};
}

// Without quantized weights the group has no bits.
Result<QuantGroup> read_layer(const Json& json, const std::string& where) {
  const Json* weight = json.find("weight");
  if (is_absent(weight)) {
    return QuantGroup{};
  }
  auto group = weight->is_array() ? read_stages(weight->as_array(), where + ".weight")
                                  : read_stage(*weight, where + ".weight");
  if (group.ok()) {
    NIBBLE_RETURN_IF_ERROR(
        read_activations(json.find("input_tensors"), where + ".input_tensors", *group));
  }
  return group;
}

Status read_pack_method(const Json& config, const std::string& where, QuantConfig& result) {
  const Json* section = config.find("export");
  if (is_absent(section)) {
    return {};
  }
  const JsonReader reader(*section, where + ".export");
  NIBBLE_ASSIGN_OR_RETURN(const std::string pack, reader.optional_string("pack_method", "reorder"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string format,
                          reader.optional_string("weight_format", "real_quantized"));
  if (pack != "reorder" && pack != "order") {
    return unsupported_at(reader.where(),
                          fmt::format("field pack_method: \"{}\" is not read", pack));
  }
  if (format != "real_quantized") {
    return unsupported_at(reader.where(),
                          fmt::format("field weight_format: \"{}\" is not read", format));
  }
  result.quark_reorder = pack == "reorder";
  return {};
}

Result<QuantConfig> read_config(const Json& config, const std::string& where) {
  QuantConfig result;
  result.dialect = Dialect::kQuark;
  NIBBLE_RETURN_IF_ERROR(read_pack_method(config, where, result));
  if (!is_absent(config.find("layer_type_quant_config"))) {
    return unsupported_at(where, "field layer_type_quant_config: parameters by class are not read");
  }
  const Json* layers = config.find("layer_quant_config");
  if (!is_absent(layers)) {
    if (!layers->is_object()) {
      return corrupt_at(where, "field layer_quant_config is no object");
    }
    for (const auto& [pattern, value] : layers->as_object()) {
      const std::string path = fmt::format("{}.layer_quant_config.{}", where, pattern);
      NIBBLE_ASSIGN_OR_RETURN(QuantGroup group, read_layer(value, path));
      if (group.bits != 0) {
        group.targets = {"glob:" + pattern};
        result.groups.push_back(std::move(group));
      }
    }
  }
  const Json* global = config.find("global_quant_config");
  if (!is_absent(global)) {
    NIBBLE_ASSIGN_OR_RETURN(QuantGroup group, read_layer(*global, where + ".global_quant_config"));
    if (group.bits != 0) {
      group.targets = {"glob:*"};
      result.groups.push_back(std::move(group));
    }
  }
  return result;
}

// vLLM takes the length of export.kv_cache_group and iterates exclude and layer_quant_config; both
// loaders find W4A8 by the two entries of `weight`, in this order.
Json write_config(const StoredQuantization& stored) {
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

bool stores(const QuantScheme& scheme) {
  return scheme.weight.code == WeightCode::kInt4 && scheme.weight.scale_per == ScalePer::kChannel &&
         scheme.act == ActFormat::kInt8Token;
}

}  // namespace

const DialectRow kQuarkDialect = {.name = "quark",
                                  .dialect = Dialect::kQuark,
                                  .codes = "*.weight in I32, I8, U8 or F8_E4M3",
                                  .read = read_config,
                                  .stores = stores,
                                  .write = write_config};

}  // namespace nibble
