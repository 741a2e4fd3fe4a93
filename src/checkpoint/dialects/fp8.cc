#include <utility>

#include "checkpoint/dialects/dialects.h"

// FP8 in the words of DeepSeek and transformers.
namespace nibble {
namespace {

using Number = QuantGroup::Number;
using Strategy = QuantGroup::Strategy;

// Activations of blocks take a scale for every 128 of a row, other dynamic ones one for the row.
Status read_activations(const JsonReader& reader, QuantGroup& group) {
  const bool blocks = group.strategy == Strategy::kBlock;
  NIBBLE_ASSIGN_OR_RETURN(const std::string scheme,
                          reader.optional_string("activation_scheme", "dynamic"));
  group.activations.format = blocks ? ActFormat::kFp8Group : ActFormat::kFp8Token;
  if (scheme == "static") {
    group.activations.scale = StoredActivations::Scale::kStatic;
  }
  if ((scheme != "static" && scheme != "dynamic") || (blocks && scheme == "static") ||
      (blocks && group.block_columns != 128)) {
    group.activations.unknown =
        fmt::format("activation_scheme \"{}\"{}", scheme, blocks ? " of weights in blocks" : "");
  }
  return {};
}

Result<QuantConfig> read_config(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  QuantGroup group;
  group.number = Number::kFloat;
  group.bits = 8;
  NIBBLE_ASSIGN_OR_RETURN(const std::string fmt, reader.optional_string("fmt", "e4m3"));
  if (fmt != "e4m3") {
    return unsupported_at(where, fmt::format("field fmt: \"{}\" is not read, only e4m3", fmt));
  }
  const Json* block = config.find("weight_block_size");
  if (block != nullptr && !block->is_null()) {
    NIBBLE_RETURN_IF_ERROR(read_block(block, "weight_block_size", where, group));
  }
  NIBBLE_RETURN_IF_ERROR(read_activations(reader, group));
  return one_group(Dialect::kFp8, std::move(group), where);
}

bool stores(const QuantScheme& scheme) {
  return scheme.weight.code == WeightCode::kFp8E4M3 && scheme.weight.scale_per == ScalePer::kBlock;
}

Json write_config(const StoredQuantization& stored) {
  const int size = stored.uses.front().scheme.weight.group_size;
  return Json::object(
      {{"quant_method", "fp8"},
       {"fmt", "e4m3"},
       {"activation_scheme", "dynamic"},
       {"weight_block_size", JsonArray{size, size}},
       {"modules_to_not_convert", JsonArray(stored.ignore.begin(), stored.ignore.end())}});
}

}  // namespace

const DialectRow kFp8Dialect = {.name = "fp8",
                                .dialect = Dialect::kFp8,
                                .codes = "*.weight in F8_E4M3",
                                .read = read_config,
                                .stores = stores,
                                .write = write_config};

}  // namespace nibble
