#include <algorithm>
#include <array>
#include <utility>

#include "checkpoint/dialects/dialects.h"
#include "checkpoint/fmpq_sidecar.h"
#include "checkpoint/linear_slots.h"

// vllm-project/compressed-tensors: the dialect that most schemes are written in.
namespace nibble {
namespace {

using Number = QuantGroup::Number;
using Strategy = QuantGroup::Strategy;

constexpr std::array<std::string_view, 8> kFormats = {
    "pack-quantized",       "int-quantized",        "float-quantized", "naive-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"};
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
// Of weights and activations alike.
constexpr std::array<std::string_view, 13> kArgumentFields = {
    "num_bits",        "type",     "symmetric", "group_size", "strategy",
    "block_structure", "dynamic",  "actorder",  "observer",   "observer_kwargs",
    "scale_dtype",     "zp_dtype", "is_mx"};

Result<std::vector<std::string>> string_list(const Json& object,
                                             std::string_view key,
                                             const std::string& where) {
  std::vector<std::string> values;
  const Json* list = object.find(key);
  if (list == nullptr || list->is_null()) {
    return values;
  }
  if (!list->is_array()) {
    return corrupt_at(where, fmt::format("field {} is not a list", key));
  }
  for (const Json& item : list->as_array()) {
    if (!item.is_string()) {
      return corrupt_at(where, fmt::format("field {} holds something other than text", key));
    }
    const auto compiles = matches_module(item.as_string(), "");
    if (!compiles.ok()) {
      return compiles.status().with_context(fmt::format("{}: field {}", where, key));
    }
    values.push_back(item.as_string());
  }
  return values;
}

Status check_format(const Json& object, const std::string& where) {
  const Json* format = object.find("format");
  const bool known =
      is_absent(format) ||
      (format->is_string() && std::ranges::find(kFormats, format->as_string()) != kFormats.end());
  return known ? Status()
               : unsupported_at(where, fmt::format("field format: {} is not read", format->dump()));
}

Status read_strategy(const Json& weights, const std::string& where, QuantGroup& group) {
  const JsonReader reader(weights, where);
  NIBBLE_ASSIGN_OR_RETURN(group.group_size, reader.optional_int("group_size", -1));
  NIBBLE_ASSIGN_OR_RETURN(
      const std::string strategy,
      reader.optional_string("strategy", group.group_size > 0 ? "group" : "tensor"));
  if (strategy == "block") {
    return read_block(weights.find("block_structure"), "block_structure", where, group);
  }
  if (strategy == "group" || strategy == "tensor_group") {
    group.strategy = Strategy::kGroup;
    return group.group_size > 0 && group.group_size <= kMostGroup
               ? Status()
               : corrupt_at(where,
                            fmt::format("field group_size: {} is no group size", group.group_size));
  }
  if (strategy != "tensor" && strategy != "channel") {
    return unsupported_at(where,
                          fmt::format("field strategy: \"{}\" is not read for weights", strategy));
  }
  group.strategy = strategy == "tensor" ? Strategy::kTensor : Strategy::kChannel;
  return {};
}

Status read_weights(const Json& weights, const std::string& where, QuantGroup& group) {
  NIBBLE_RETURN_IF_ERROR(check_fields(weights, kArgumentFields, where));
  const JsonReader reader(weights, where);
  NIBBLE_ASSIGN_OR_RETURN(group.bits, reader.optional_int("num_bits", 8));
  NIBBLE_ASSIGN_OR_RETURN(const std::string type, reader.optional_string("type", "int"));
  NIBBLE_ASSIGN_OR_RETURN(group.symmetric, reader.optional_bool("symmetric", true));
  NIBBLE_ASSIGN_OR_RETURN(const bool dynamic, reader.optional_bool("dynamic", false));
  if (type != "int" && type != "float") {
    return unsupported_at(where, fmt::format("field type: \"{}\" is not read", type));
  }
  if (group.bits != 4 && group.bits != 8) {
    return unsupported_at(
        where, fmt::format("field num_bits: {}-bit codes are not read, only 4 and 8", group.bits));
  }
  if (dynamic) {
    return unsupported_at(where, "field dynamic: weights cannot be dynamic");
  }
  group.number = type == "int" ? Number::kInt : Number::kFloat;
  if (group.number == Number::kFloat && !group.symmetric) {
    return unsupported_at(where, "field symmetric: floats with zero points are not read");
  }
  return read_strategy(weights, where, group);
}

// What a dynamic scale covers is left to the product: a scale for each token is the finest.
void understand_8_bits(const Json& json,
                       const std::string& strategy,
                       bool dynamic,
                       StoredActivations& out) {
  const Json* type = json.find("type");
  const bool real = type != nullptr && type->is_string() && type->as_string() == "float";
  const Json* size = json.find("group_size");
  if (strategy == "token" || strategy == "tensor") {
    out.format = real ? ActFormat::kFp8Token : ActFormat::kInt8Token;
    out.scale = dynamic ? StoredActivations::Scale::kDynamic : StoredActivations::Scale::kStatic;
    if (strategy == "token" && !dynamic) {
      out.unknown = "static activation scales by token";
    }
  } else if (real && dynamic && strategy == "group" && size != nullptr && size->is_int() &&
             size->as_int() == 128) {
    out.format = ActFormat::kFp8Group;
  } else {
    out.unknown = fmt::format("8-bit activations with strategy \"{}\"", strategy);
  }
}

Status read_activations(const Json* json, const std::string& where, StoredActivations& out) {
  if (is_absent(json)) {
    return {};
  }
  NIBBLE_RETURN_IF_ERROR(check_fields(*json, kArgumentFields, where));
  out.where = where;
  const JsonReader reader(*json, where);
  NIBBLE_ASSIGN_OR_RETURN(const int64_t bits, reader.optional_int("num_bits", 8));
  NIBBLE_ASSIGN_OR_RETURN(const std::string type, reader.optional_string("type", "int"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string strategy, reader.optional_string("strategy", "tensor"));
  NIBBLE_ASSIGN_OR_RETURN(const bool symmetric, reader.optional_bool("symmetric", true));
  if (strategy == kFmpqGatherStrategy) {
    out.gathered = true;
    return {};
  }
  const Json* word = json->find("dynamic");
  const bool local = word != nullptr && word->is_string();  // NVFP4: "local"
  bool dynamic = local;
  if (!local) {
    NIBBLE_ASSIGN_OR_RETURN(dynamic, reader.optional_bool("dynamic", false));
  }
  if (bits == 4 && type == "float") {
    out.dropped = "rounding of activations to 4-bit floats";
  } else if (bits != 8 || (type != "int" && type != "float")) {
    out.unknown = fmt::format("{}-bit {} activations", bits, type);
  } else if (!symmetric) {
    out.unknown = "activations with zero points";
  } else {
    understand_8_bits(*json, strategy, dynamic, out);
  }
  return {};
}

Result<QuantGroup> read_group(const Json& json, const std::string& where) {
  NIBBLE_RETURN_IF_ERROR(check_fields(json, kGroupFields, where));
  NIBBLE_RETURN_IF_ERROR(check_format(json, where));
  QuantGroup group;
  group.where = where;
  if (json.find("targets") == nullptr) {
    return corrupt_at(where, "field targets is missing or no list");
  }
  NIBBLE_ASSIGN_OR_RETURN(group.targets, string_list(json, "targets", where));
  const Json* weights = json.find("weights");
  if (is_absent(weights)) {
    return group;  // of no quantized weights
  }
  NIBBLE_RETURN_IF_ERROR(read_weights(*weights, where + ".weights", group));
  NIBBLE_RETURN_IF_ERROR(read_activations(json.find("input_activations"),
                                          where + ".input_activations", group.activations));
  if (!is_absent(json.find("output_activations"))) {
    group.activations.where = where + ".output_activations";
    group.activations.unknown = "quantized outputs (output_activations)";
  }
  return group;
}

Status refuse_sparse_weights(const Json& config, const std::string& where) {
  const Json* sparsity = config.find("sparsity_config");
  if (!is_absent(sparsity)) {
    const Json* format = sparsity->find("format");
    if (format == nullptr || !format->is_string() || format->as_string() != "dense") {
      return unsupported_at(where, "field sparsity_config: sparse weights are not read");
    }
  }
  return {};
}

Result<QuantConfig> read_config(const Json& config, const std::string& where) {
  NIBBLE_RETURN_IF_ERROR(check_fields(config, kConfigFields, where));
  NIBBLE_RETURN_IF_ERROR(check_format(config, where));
  NIBBLE_RETURN_IF_ERROR(refuse_sparse_weights(config, where));
  QuantConfig result;
  if (const Json* transforms = config.find("transform_config"); !is_absent(transforms)) {
    NIBBLE_ASSIGN_OR_RETURN(result.turned,
                            read_transform_config(*transforms, where + ".transform_config"));
  }
  result.dialect = Dialect::kCompressedTensors;
  NIBBLE_ASSIGN_OR_RETURN(result.ignore, string_list(config, "ignore", where));
  const Json* groups = config.find("config_groups");
  if (groups == nullptr || !groups->is_object()) {
    return corrupt_at(where, "field config_groups is missing or no object");
  }
  for (const auto& [name, value] : groups->as_object()) {
    NIBBLE_ASSIGN_OR_RETURN(QuantGroup group,
                            read_group(value, fmt::format("{}.config_groups.{}", where, name)));
    if (group.bits != 0) {
      result.groups.push_back(std::move(group));
    }
  }
  return result;
}

// --- Writing ---

constexpr int64_t kFp8GroupSize = 128;

const char* format_name(const QuantScheme& scheme) {
  switch (scheme.weight.code) {
    case WeightCode::kInt4:
      return "pack-quantized";
    case WeightCode::kFp4E2M1:
      return "mxfp4-pack-quantized";
    case WeightCode::kFp8E4M3:
      return "float-quantized";
    default:
      return stores_int8_in_words(scheme) ? "pack-quantized" : "int-quantized";
  }
}

const char* strategy(const WeightFormat& weight) {
  switch (weight.scale_per) {
    case ScalePer::kGroup:
      return "group";
    case ScalePer::kTensor:
      return "tensor";
    case ScalePer::kBlock:
      return "block";
    case ScalePer::kNone:
    case ScalePer::kChannel:
      break;
  }
  return "channel";
}

Json weights_json(const WeightFormat& weight) {
  const bool four = weight.code == WeightCode::kInt4 || weight.code == WeightCode::kFp4E2M1;
  const bool real = weight.code == WeightCode::kFp8E4M3 || weight.code == WeightCode::kFp4E2M1;
  const bool grouped = weight.scale_per == ScalePer::kGroup;
  const bool symmetric = weight.zero_points == ZeroPoints::kNone;
  Json json = Json::object({{"num_bits", four ? 4 : 8},
                            {"type", real ? "float" : "int"},
                            {"symmetric", symmetric},
                            {"strategy", strategy(weight)},
                            {"group_size", grouped ? Json(weight.group_size) : Json()},
                            {"dynamic", false},
                            {"actorder", nullptr}});
  if (weight.scale_per == ScalePer::kBlock) {
    json.set("block_structure", JsonArray{weight.group_size, weight.group_size});
  }
  if (!symmetric) {
    json.set("zp_dtype", "torch.int8");
  }
  if (weight.scale_dtype == DType::kF8E8M0) {
    json.set("scale_dtype", "torch.uint8");
  }
  return json;
}

// Of rows in blocks a file of its own tells (fmpq_sidecar.h): without it weights alone are
// quantized.
Json activation_json(ActFormat act) {
  if (act == ActFormat::kFloat || act == ActFormat::kBf16 || in_blocks(act)) {
    return nullptr;
  }
  const bool grouped = act == ActFormat::kFp8Group;
  return Json::object({{"num_bits", 8},
                       {"type", act == ActFormat::kInt8Token ? "int" : "float"},
                       {"symmetric", true},
                       {"strategy", grouped ? "group" : "token"},
                       {"group_size", grouped ? Json(kFp8GroupSize) : Json()},
                       {"dynamic", true},
                       {"actorder", nullptr}});
}

Json kv_cache_json(KvCacheScheme scheme) {
  if (scheme == KvCacheScheme::kNone) {
    return nullptr;
  }
  return Json::object({{"num_bits", 8},
                       {"type", "float"},
                       {"symmetric", true},
                       {"strategy", "tensor"},
                       {"dynamic", false}});
}

JsonArray targets_of(const SchemeUse& use) {
  if (use.modules.empty()) {
    return {"Linear"};
  }
  return {use.modules.begin(), use.modules.end()};
}

// One group per scheme; "mixed-precision" when their formats differ.
Json write_config(const StoredQuantization& stored) {
  std::string_view format = stored.uses.empty() ? "dense" : format_name(stored.uses.front().scheme);
  std::vector<JsonObject::Member> groups;
  for (const SchemeUse& use : stored.uses) {
    const char* own = format_name(use.scheme);
    format = format == own ? format : "mixed-precision";
    groups.emplace_back(fmt::format("group_{}", groups.size()),
                        Json::object({{"targets", targets_of(use)},
                                      {"weights", weights_json(use.scheme.weight)},
                                      {"input_activations", activation_json(use.scheme.act)},
                                      {"output_activations", nullptr},
                                      {"format", own}}));
  }
  Json config = Json::object({{"quant_method", "compressed-tensors"},
                              {"format", format},
                              {"quantization_status", "compressed"},
                              {"kv_cache_scheme", kv_cache_json(stored.kv_cache)},
                              {"config_groups", Json::object(std::move(groups))},
                              {"ignore", JsonArray(stored.ignore.begin(), stored.ignore.end())}});
  if (!stored.transforms.is_null()) {
    config.set("transform_config", stored.transforms);
  }
  return config;
}

}  // namespace

const DialectRow kCompressedTensorsDialect = {
    .name = "compressed-tensors",
    .dialect = Dialect::kCompressedTensors,
    .codes = "*.weight_packed, or *.weight in I8 or F8_E4M3",
    .read = read_config,
    .stores = [](const QuantScheme&) { return true; },
    .write = write_config};

}  // namespace nibble
