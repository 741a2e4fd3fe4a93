#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "checkpoint/dialects/source_dialects.h"
#include "checkpoint/quant_config.h"

namespace nibble {
namespace {

using Number = SourceGroup::Number;
using Strategy = SourceGroup::Strategy;

constexpr int64_t kMaxGroup = 1 << 20;
// What may stand in "weights"; another field could change the meaning of the codes.
constexpr std::array<std::string_view, 13> kWeightFields = {
    "num_bits",        "type",     "symmetric", "group_size", "strategy",
    "block_structure", "dynamic",  "actorder",  "observer",   "observer_kwargs",
    "scale_dtype",     "zp_dtype", "is_mx"};

Status read_block(const Json& weights, const std::string& where, SourceGroup& group) {
  const Json* block = weights.find("block_structure");
  const bool two = block != nullptr && block->is_array() && block->as_array().size() == 2 &&
                   block->as_array()[0].is_int() && block->as_array()[1].is_int();
  if (!two || block->as_array()[0].as_int() <= 0 || block->as_array()[1].as_int() <= 0) {
    return corrupt_at(where, "field block_structure: expected two positive integers");
  }
  group.block_rows = block->as_array()[0].as_int();
  group.block_columns = block->as_array()[1].as_int();
  return {};
}

Status read_strategy(const Json& weights, const std::string& where, SourceGroup& group) {
  const JsonReader reader(weights, where);
  NIBBLE_ASSIGN_OR_RETURN(group.group_size, reader.optional_int("group_size", -1));
  NIBBLE_ASSIGN_OR_RETURN(
      const std::string strategy,
      reader.optional_string("strategy", group.group_size > 0 ? "group" : "tensor"));
  if (strategy == "block") {
    group.strategy = Strategy::kBlock;
    return read_block(weights, where, group);
  }
  if (strategy == "group" || strategy == "tensor_group") {
    group.strategy = Strategy::kGroup;
    if (group.group_size <= 0 || group.group_size > kMaxGroup) {
      return corrupt_at(where,
                        fmt::format("field group_size: {} is no group size", group.group_size));
    }
  } else if (strategy == "tensor" || strategy == "channel") {
    group.strategy = strategy == "tensor" ? Strategy::kTensor : Strategy::kChannel;
  } else {
    return unsupported_at(where,
                          fmt::format("field strategy: \"{}\" is not read for weights", strategy));
  }
  return {};
}

Status read_weights(const Json& weights, const std::string& where, SourceGroup& group) {
  if (!weights.is_object()) {
    return corrupt_at(where, "not a JSON object");
  }
  for (const auto& [key, value] : weights.as_object()) {
    if (std::find(kWeightFields.begin(), kWeightFields.end(), key) == kWeightFields.end()) {
      return unsupported_at(where, fmt::format("unknown field \"{}\"", key));
    }
  }
  const JsonReader reader(weights, where);
  NIBBLE_ASSIGN_OR_RETURN(group.bits, reader.optional_int("num_bits", 8));
  NIBBLE_ASSIGN_OR_RETURN(const std::string type, reader.optional_string("type", "int"));
  NIBBLE_ASSIGN_OR_RETURN(group.symmetric, reader.optional_bool("symmetric", true));
  if (type != "int" && type != "float") {
    return unsupported_at(where, fmt::format("field type: \"{}\" is not read", type));
  }
  if (group.bits != 4 && group.bits != 8) {
    return unsupported_at(
        where, fmt::format("field num_bits: {}-bit codes are not read, only 4 and 8", group.bits));
  }
  group.number = type == "int" ? Number::kInt : Number::kFloat;
  if (group.number == Number::kFloat && !group.symmetric) {
    return unsupported_at(where, "field symmetric: floats with zero points are not read");
  }
  return read_strategy(weights, where, group);
}

Result<SourceGroup> read_group(const Json& json, const std::string& where) {
  SourceGroup group;
  group.where = where;
  if (!json.is_object()) {
    return corrupt_at(where, "not a JSON object");
  }
  const Json* targets = json.find("targets");
  if (targets == nullptr || !targets->is_array()) {
    return corrupt_at(where, "field targets is missing or no list");
  }
  for (const Json& target : targets->as_array()) {
    if (!target.is_string()) {
      return corrupt_at(where, "field targets holds something other than text");
    }
    const auto compiles = matches_module(target.as_string(), "");
    if (!compiles.ok()) {
      return compiles.status().with_context(where + ": field targets");
    }
    group.targets.push_back(target.as_string());
  }
  const Json* weights = json.find("weights");
  if (!is_absent(weights)) {
    NIBBLE_RETURN_IF_ERROR(read_weights(*weights, where + ".weights", group));
  }
  return group;
}

}  // namespace

Result<SourceConfig> parse_compressed_tensors_source(const Json& config, const std::string& where) {
  SourceConfig result;
  result.method = SourceMethod::kCompressedTensors;
  const Json* sparsity = config.find("sparsity_config");
  if (!is_absent(sparsity)) {
    const Json* format = sparsity->find("format");
    if (format == nullptr || !format->is_string() || format->as_string() != "dense") {
      return unsupported_at(where, "field sparsity_config: sparse weights are not read");
    }
  }
  const Json* transform = config.find("transform_config");
  const Json* transforms = is_absent(transform) ? nullptr : transform->find("config_groups");
  if (!is_absent(transform) && !(transforms != nullptr && is_absent(transforms))) {
    return unsupported_at(where, "field transform_config: rotated weights are not read");
  }
  const Json* groups = config.find("config_groups");
  if (groups == nullptr || !groups->is_object()) {
    return corrupt_at(where, "field config_groups is missing or no object");
  }
  for (const auto& [name, value] : groups->as_object()) {
    NIBBLE_ASSIGN_OR_RETURN(SourceGroup group,
                            read_group(value, fmt::format("{}.config_groups.{}", where, name)));
    if (group.bits != 0) {
      result.groups.push_back(std::move(group));
    }
  }
  return result;
}

}  // namespace nibble
