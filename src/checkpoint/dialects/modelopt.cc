#include <utility>

#include "checkpoint/dialects/dialects.h"

// NVIDIA ModelOpt: FP8 and NVFP4.
namespace nibble {
namespace {

using Number = QuantGroup::Number;
using Strategy = QuantGroup::Strategy;

Result<QuantConfig> read_config(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  NIBBLE_ASSIGN_OR_RETURN(const std::string algorithm, reader.required_string("quant_algo"));
  QuantGroup group;
  group.number = Number::kFloat;
  if (algorithm == "NVFP4") {
    NIBBLE_ASSIGN_OR_RETURN(group.group_size, reader.optional_int("group_size", 16));
    group.bits = 4;
    group.strategy = Strategy::kGroup;
    group.activations.dropped = "rounding of activations to 4-bit floats";
    if (group.group_size != 16) {
      return unsupported_at(
          where, fmt::format("field group_size: {}; blocks of NVFP4 have 16", group.group_size));
    }
  } else if (algorithm == "FP8") {
    group.bits = 8;
    group.activations = {.format = ActFormat::kFp8Token,
                         .scale = StoredActivations::Scale::kStatic};
  } else {
    return unsupported_at(where, fmt::format("field quant_algo: \"{}\" is not read, only NVFP4 and "
                                             "FP8",
                                             algorithm));
  }
  return one_group(Dialect::kModelOpt, std::move(group), where);
}

}  // namespace

const DialectRow kModelOptDialect = {.name = "modelopt",
                                     .dialect = Dialect::kModelOpt,
                                     .codes = "*.weight in U8 or F8_E4M3",
                                     .read = read_config};

}  // namespace nibble
