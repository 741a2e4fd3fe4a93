#include "checkpoint/dialects/compressed_tensors.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "checkpoint/dialects/source_dialects.h"

namespace nibble::compressed_tensors {
namespace {

constexpr std::array<std::string_view, 3> kFormats = {"pack-quantized", "int-quantized",
                                                      "float-quantized"};
constexpr std::array<std::string_view, 12> kConfigFields = {"config_groups",
                                                            "quant_method",
                                                            "kv_cache_scheme",
                                                            "format",
                                                            "quantization_status",
                                                            "ignore",
                                                            "sparsity_config",
                                                            "transform_config",
                                                            "global_compression_ratio",
                                                            "moe_sparsity_config",
                                                            "version",
                                                            "run_compressed"};
constexpr std::array<std::string_view, 5> kGroupFields = {"targets", "weights", "input_activations",
                                                          "output_activations", "format"};
constexpr std::array<std::string_view, 12> kArgumentFields = {
    "num_bits", "type",     "symmetric",   "group_size", "strategy", "block_structure",
    "dynamic",  "actorder", "scale_dtype", "zp_dtype",   "observer", "observer_kwargs"};

/// One QuantizationArgs object.
struct Arguments {
  int64_t num_bits = 0;
  std::string type;
  std::string strategy;
  int64_t group_size = 0;
  bool dynamic = false;
};

Status check_fields(const Json& object,
                    std::span<const std::string_view> known,
                    const std::string& where) {
  if (!object.is_object()) {
    return corrupt_at(where, "not a JSON object");
  }
  for (const auto& [key, value] : object.as_object()) {
    if (std::find(known.begin(), known.end(), key) == known.end()) {
      return unsupported_at(where, fmt::format("unknown field \"{}\"", key));
    }
  }
  return {};
}

Result<std::vector<std::string>> string_list(const Json& object,
                                             std::string_view key,
                                             const std::string& where) {
  std::vector<std::string> values;
  const Json* list = object.find(key);
  if (list == nullptr || list->is_null()) {
    return values;
  }
  if (!list->is_array()) {
    return make_error(StatusCode::kCorrupt, "{}: field {} is not a list", where, key);
  }
  for (const Json& item : list->as_array()) {
    if (!item.is_string()) {
      return make_error(StatusCode::kCorrupt, "{}: field {} holds something other than text", where,
                        key);
    }
    const auto compiles = matches_module(item.as_string(), "");
    if (!compiles.ok()) {
      return compiles.status().with_context(fmt::format("{}: field {}", where, key));
    }
    values.push_back(item.as_string());
  }
  return values;
}

// null, false, "weight" and "static" leave the columns where they are.
Status check_actorder(const Json& object, const std::string& where) {
  const Json* order = object.find("actorder");
  const bool harmless =
      is_absent(order) || (order->is_bool() && !order->as_bool()) ||
      (order->is_string() && (order->as_string() == "weight" || order->as_string() == "static"));
  return harmless ? Status()
                  : unsupported_at(where,
                                   "field actorder: reordered columns are not supported; "
                                   "quantize with actorder null, static or weight");
}

Result<Arguments> parse_arguments(const Json& object, const std::string& where) {
  NIBBLE_RETURN_IF_ERROR(check_fields(object, kArgumentFields, where));
  const JsonReader reader(object, where);
  Arguments arguments;
  NIBBLE_ASSIGN_OR_RETURN(arguments.num_bits, reader.optional_int("num_bits", 8));
  NIBBLE_ASSIGN_OR_RETURN(arguments.type, reader.optional_string("type", "int"));
  NIBBLE_ASSIGN_OR_RETURN(arguments.group_size, reader.optional_int("group_size", -1));
  NIBBLE_ASSIGN_OR_RETURN(
      arguments.strategy,
      reader.optional_string("strategy", arguments.group_size > 0 ? "group" : "tensor"));
  NIBBLE_ASSIGN_OR_RETURN(const bool symmetric, reader.optional_bool("symmetric", true));
  if (!symmetric) {
    return unsupported_at(where, "field symmetric: zero points are not supported");
  }
  const Json* dynamic = object.find("dynamic");
  if (dynamic != nullptr && dynamic->is_string()) {
    return unsupported_at(
        where, fmt::format("field dynamic: \"{}\" is not supported", dynamic->as_string()));
  }
  NIBBLE_ASSIGN_OR_RETURN(arguments.dynamic, reader.optional_bool("dynamic", false));
  if (!is_absent(object.find("block_structure"))) {
    return unsupported_at(where, "field block_structure: block scales are not supported");
  }
  NIBBLE_RETURN_IF_ERROR(check_actorder(object, where));
  return arguments;
}

Result<WeightFormat> weight_format(const Arguments& arguments, const std::string& where) {
  WeightFormat format;
  if (arguments.dynamic) {
    return unsupported_at(where, "field dynamic: weights cannot be dynamic");
  }
  if (arguments.type == "int" && arguments.num_bits == 4) {
    format.code = WeightCode::kInt4;
  } else if (arguments.type == "int" && arguments.num_bits == 8) {
    format.code = WeightCode::kInt8;
  } else if (arguments.type == "float" && arguments.num_bits == 8) {
    format.code = WeightCode::kFp8E4M3;
  } else {
    return unsupported_at(where, fmt::format("{}-bit {} weights are not supported",
                                             arguments.num_bits, arguments.type));
  }
  if (arguments.strategy == "channel" || arguments.strategy == "tensor") {
    format.scale_per = ScalePer::kChannel;  // one scale of a tensor is repeated when it is read
  } else if (arguments.strategy == "group") {
    if (arguments.group_size <= 0 || arguments.group_size > (1 << 20)) {
      return unsupported_at(
          where, fmt::format("field group_size: {} is not a group size", arguments.group_size));
    }
    format.scale_per = ScalePer::kGroup;
    format.group_size = static_cast<int>(arguments.group_size);
  } else {
    return unsupported_at(where, fmt::format("field strategy: \"{}\" is not supported for weights",
                                             arguments.strategy));
  }
  return format;
}

Result<ActFormat> activation_format(const Json* object, const std::string& where) {
  if (is_absent(object)) {
    return ActFormat::kFloat;
  }
  NIBBLE_ASSIGN_OR_RETURN(const Arguments arguments, parse_arguments(*object, where));
  if (arguments.strategy != "token" || !arguments.dynamic || arguments.num_bits != 8) {
    return unsupported_at(where,
                          "only dynamic 8-bit activations with one scale per token (strategy "
                          "token) are supported");
  }
  if (arguments.type == "int") {
    return ActFormat::kInt8Token;
  }
  if (arguments.type == "float") {
    return ActFormat::kFp8Token;
  }
  return unsupported_at(where, fmt::format("field type: \"{}\" is not supported", arguments.type));
}

Status check_format(const Json& object, const std::string& where) {
  const Json* format = object.find("format");
  if (is_absent(format)) {
    return {};
  }
  const bool known = format->is_string() && (std::find(kFormats.begin(), kFormats.end(),
                                                       format->as_string()) != kFormats.end() ||
                                             format->as_string() == "mixed-precision");
  return known ? Status()
               : unsupported_at(where, fmt::format("field format: {} is not supported; known are "
                                                   "pack-quantized, int-quantized, float-quantized",
                                                   format->dump()));
}

Result<QuantGroup> parse_group(const Json& object, const std::string& where) {
  NIBBLE_RETURN_IF_ERROR(check_fields(object, kGroupFields, where));
  NIBBLE_RETURN_IF_ERROR(check_format(object, where));
  QuantGroup group;
  NIBBLE_ASSIGN_OR_RETURN(group.targets, string_list(object, "targets", where));
  const Json* weights = object.find("weights");
  if (is_absent(weights)) {
    return unsupported_at(where,
                          "field weights: a group without quantized weights is not supported");
  }
  const std::string weights_path = where + ".weights";
  NIBBLE_ASSIGN_OR_RETURN(const Arguments arguments, parse_arguments(*weights, weights_path));
  NIBBLE_ASSIGN_OR_RETURN(group.weight, weight_format(arguments, weights_path));
  NIBBLE_ASSIGN_OR_RETURN(
      group.act, activation_format(object.find("input_activations"), where + ".input_activations"));
  if (!is_absent(object.find("output_activations"))) {
    return unsupported_at(where, "field output_activations: quantized outputs are not supported");
  }
  if (group.act == ActFormat::kInt8Token &&
      (group.weight.code == WeightCode::kFp8E4M3 || group.weight.scale_per == ScalePer::kGroup)) {
    return unsupported_at(where,
                          "int8 activations need integer weights with one scale per channel");
  }
  return group;
}

}  // namespace

Result<QuantConfig> parse_config(const Json& config, const std::string& where) {
  NIBBLE_RETURN_IF_ERROR(check_fields(config, kConfigFields, where));
  NIBBLE_RETURN_IF_ERROR(check_format(config, where));
  for (const std::string_view field : {"sparsity_config", "transform_config"}) {
    if (!is_absent(config.find(field))) {
      return unsupported_at(where, fmt::format("field {} is not supported", field));
    }
  }
  QuantConfig result;
  NIBBLE_ASSIGN_OR_RETURN(result.ignore, string_list(config, "ignore", where));
  const Json* groups = config.find("config_groups");
  if (groups == nullptr || !groups->is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: field config_groups is missing or no object",
                      where);
  }
  for (const auto& [name, value] : groups->as_object()) {
    NIBBLE_ASSIGN_OR_RETURN(QuantGroup group,
                            parse_group(value, fmt::format("{}.config_groups.{}", where, name)));
    result.groups.push_back(std::move(group));
  }
  return result;
}

}  // namespace nibble::compressed_tensors
