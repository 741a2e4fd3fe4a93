#include <utility>

#include "checkpoint/dialects/dialects.h"

// GPTQ in the words of AutoGPTQ and GPTQModel, and AWQ in those of AutoAWQ: both are 4-bit codes in
// groups.
namespace nibble {
namespace {

using Number = QuantGroup::Number;
using Strategy = QuantGroup::Strategy;

// "dynamic" overrides bits or groups of single modules; entries that only skip modules say nothing.
Status check_dynamic(const Json& config, const std::string& where) {
  const Json* dynamic = config.find("dynamic");
  if (dynamic == nullptr || dynamic->is_null() || (dynamic->is_bool() && !dynamic->as_bool())) {
    return {};
  }
  if (!dynamic->is_object()) {
    return corrupt_at(where, "field dynamic is no object");
  }
  for (const auto& [pattern, value] : dynamic->as_object()) {
    if (!pattern.starts_with("-:")) {
      return unsupported_at(where,
                            fmt::format("field dynamic: parameters for single modules (\"{}\") "
                                        "are not read",
                                        pattern));
    }
  }
  return {};
}

Result<QuantGroup> int4_group(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  QuantGroup group;
  NIBBLE_ASSIGN_OR_RETURN(group.bits, reader.required_int("bits"));
  NIBBLE_ASSIGN_OR_RETURN(group.group_size, reader.optional_int("group_size", -1));
  if (group.bits != 4) {
    return unsupported_at(
        where, fmt::format("field bits: {}-bit codes are not read, only 4-bit ones", group.bits));
  }
  if (group.group_size != -1 && (group.group_size <= 0 || group.group_size > kMostGroup)) {
    return unsupported_at(where,
                          fmt::format("field group_size: {} is no group size", group.group_size));
  }
  group.number = Number::kUint;
  group.strategy = Strategy::kGroup;
  return group;
}

Result<QuantConfig> read_gptq(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  NIBBLE_ASSIGN_OR_RETURN(QuantGroup group, int4_group(config, where));
  NIBBLE_ASSIGN_OR_RETURN(group.symmetric, reader.optional_bool("sym", true));
  NIBBLE_ASSIGN_OR_RETURN(const std::string format,
                          reader.optional_string("checkpoint_format", "gptq"));
  NIBBLE_ASSIGN_OR_RETURN(const std::string pack, reader.optional_string("pack_dtype", "int32"));
  if (format != "gptq" && format != "gptq_v2") {
    return unsupported_at(where,
                          fmt::format("field checkpoint_format: \"{}\" is not read, only gptq "
                                      "and gptq_v2",
                                      format));
  }
  if (pack != "int32") {
    return unsupported_at(where, fmt::format("field pack_dtype: \"{}\" is not read", pack));
  }
  NIBBLE_RETURN_IF_ERROR(check_dynamic(config, where));
  QuantConfig result = one_group(Dialect::kGptq, std::move(group), where);
  result.gptq_v2 = format == "gptq_v2";
  return result;
}

Result<QuantConfig> read_awq(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  NIBBLE_ASSIGN_OR_RETURN(QuantGroup group, int4_group(config, where));
  NIBBLE_ASSIGN_OR_RETURN(const bool zero_point, reader.optional_bool("zero_point", true));
  NIBBLE_ASSIGN_OR_RETURN(const std::string version, reader.optional_string("version", "gemm"));
  if (version != "gemm" && version != "GEMM") {
    return unsupported_at(where,
                          fmt::format("field version: \"{}\" is not read, only gemm", version));
  }
  if (!zero_point) {
    return unsupported_at(where, "field zero_point: files without zero points are not read");
  }
  group.symmetric = false;
  return one_group(Dialect::kAwq, std::move(group), where);
}

}  // namespace

const DialectRow kGptqDialect = {
    .name = "gptq", .dialect = Dialect::kGptq, .codes = "*.qweight", .read = read_gptq};
const DialectRow kAwqDialect = {
    .name = "awq", .dialect = Dialect::kAwq, .codes = "*.qweight", .read = read_awq};

}  // namespace nibble
