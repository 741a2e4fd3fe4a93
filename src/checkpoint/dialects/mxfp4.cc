#include <utility>

#include "checkpoint/dialects/dialects.h"

// gpt-oss: blocks of 32 numbers of 4 bits.
namespace nibble {
namespace {

using Number = QuantGroup::Number;
using Strategy = QuantGroup::Strategy;

Result<QuantConfig> read_config(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  NIBBLE_ASSIGN_OR_RETURN(const int64_t size, reader.optional_int("group_size", 32));
  if (size != 32) {
    return unsupported_at(where,
                          fmt::format("field group_size: {}; blocks of MXFP4 have 32", size));
  }
  QuantGroup group;
  group.number = Number::kFloat;
  group.bits = 4;
  group.strategy = Strategy::kGroup;
  group.group_size = 32;
  return one_group(Dialect::kMxfp4, std::move(group), where);
}

}  // namespace

const DialectRow kMxfp4Dialect = {
    .name = "mxfp4", .dialect = Dialect::kMxfp4, .codes = "*_blocks in U8", .read = read_config};

}  // namespace nibble
