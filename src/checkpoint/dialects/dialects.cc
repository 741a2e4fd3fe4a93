#include "checkpoint/dialects/dialects.h"

#include <algorithm>
#include <array>
#include <utility>

namespace nibble {

std::span<const DialectRow* const> all_dialects() {
  static constexpr std::array kDialects = {&kCompressedTensorsDialect,
                                           &kGptqDialect,
                                           &kAwqDialect,
                                           &kFp8Dialect,
                                           &kMxfp4Dialect,
                                           &kQuarkDialect,
                                           &kModelOptDialect};
  return kDialects;
}

Status corrupt_at(std::string_view where, std::string_view what) {
  return make_error(StatusCode::kCorrupt, "{}: {}", where, what);
}

Status unsupported_at(std::string_view where, std::string_view what) {
  return make_error(StatusCode::kUnsupported, "{}: {}", where, what);
}

bool is_absent(const Json* value) {
  return value == nullptr || value->is_null() || (value->is_object() && value->as_object().empty());
}

Status check_fields(const Json& object,
                    std::span<const std::string_view> known,
                    const std::string& where) {
  if (!object.is_object()) {
    return corrupt_at(where, "not a JSON object");
  }
  for (const auto& [key, value] : object.as_object()) {
    if (std::ranges::find(known, key) == known.end()) {
      return unsupported_at(where, fmt::format("unknown field \"{}\"", key));
    }
  }
  return {};
}

Status read_block(const Json* value,
                  std::string_view field,
                  const std::string& where,
                  QuantGroup& group) {
  const bool two = value != nullptr && value->is_array() && value->as_array().size() == 2 &&
                   value->as_array()[0].is_int() && value->as_array()[1].is_int();
  if (!two || value->as_array()[0].as_int() <= 0 || value->as_array()[1].as_int() <= 0) {
    return corrupt_at(where, fmt::format("field {}: expected two positive integers, got {}", field,
                                         value == nullptr ? "nothing" : value->dump()));
  }
  group.strategy = QuantGroup::Strategy::kBlock;
  group.block_rows = value->as_array()[0].as_int();
  group.block_columns = value->as_array()[1].as_int();
  return {};
}

QuantConfig one_group(Dialect dialect, QuantGroup group, const std::string& where) {
  QuantConfig config;
  config.dialect = dialect;
  group.targets = {std::string(kEveryModule)};
  group.where = where;
  config.groups.push_back(std::move(group));
  return config;
}

}  // namespace nibble
