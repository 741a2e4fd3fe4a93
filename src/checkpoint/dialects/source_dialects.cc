#include "checkpoint/dialects/source_dialects.h"

#include <array>
#include <utility>

namespace nibble {
namespace {

using Number = SourceGroup::Number;
using Strategy = SourceGroup::Strategy;

constexpr std::string_view kEverything = "glob:*";

SourceConfig one_group(SourceMethod method, SourceGroup group, const std::string& where) {
  SourceConfig config;
  config.method = method;
  group.targets = {std::string(kEverything)};
  group.where = where;
  config.groups.push_back(std::move(group));
  return config;
}

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

Result<SourceGroup> int4_group(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  SourceGroup group;
  NIBBLE_ASSIGN_OR_RETURN(group.bits, reader.required_int("bits"));
  NIBBLE_ASSIGN_OR_RETURN(group.group_size, reader.optional_int("group_size", -1));
  if (group.bits != 4) {
    return unsupported_at(
        where, fmt::format("field bits: {}-bit codes are not read, only 4-bit ones", group.bits));
  }
  if (group.group_size != -1 && (group.group_size <= 0 || group.group_size > (1 << 20))) {
    return unsupported_at(where,
                          fmt::format("field group_size: {} is no group size", group.group_size));
  }
  group.number = Number::kUint;
  group.strategy = Strategy::kGroup;
  return group;
}

Result<SourceConfig> parse_gptq(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  NIBBLE_ASSIGN_OR_RETURN(SourceGroup group, int4_group(config, where));
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
  SourceConfig result = one_group(SourceMethod::kGptq, std::move(group), where);
  result.gptq_v2 = format == "gptq_v2";
  return result;
}

Result<SourceConfig> parse_awq(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  NIBBLE_ASSIGN_OR_RETURN(SourceGroup group, int4_group(config, where));
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
  return one_group(SourceMethod::kAwq, std::move(group), where);
}

Result<SourceConfig> parse_fp8(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  SourceGroup group;
  group.number = Number::kFloat;
  group.bits = 8;
  NIBBLE_ASSIGN_OR_RETURN(const std::string fmt, reader.optional_string("fmt", "e4m3"));
  if (fmt != "e4m3") {
    return unsupported_at(where, fmt::format("field fmt: \"{}\" is not read, only e4m3", fmt));
  }
  const Json* block = config.find("weight_block_size");
  if (block != nullptr && !block->is_null()) {
    const bool two = block->is_array() && block->as_array().size() == 2 &&
                     block->as_array()[0].is_int() && block->as_array()[1].is_int();
    if (!two || block->as_array()[0].as_int() <= 0 || block->as_array()[1].as_int() <= 0) {
      return corrupt_at(where,
                        fmt::format("field weight_block_size: expected two positive integers, "
                                    "got {}",
                                    block->dump()));
    }
    group.strategy = Strategy::kBlock;
    group.block_rows = block->as_array()[0].as_int();
    group.block_columns = block->as_array()[1].as_int();
  }
  return one_group(SourceMethod::kFp8, std::move(group), where);
}

Result<SourceConfig> parse_mxfp4(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  NIBBLE_ASSIGN_OR_RETURN(const int64_t size, reader.optional_int("group_size", 32));
  if (size != 32) {
    return unsupported_at(where,
                          fmt::format("field group_size: {}; blocks of MXFP4 have 32", size));
  }
  SourceGroup group;
  group.number = Number::kFloat;
  group.bits = 4;
  group.strategy = Strategy::kGroup;
  group.group_size = 32;
  return one_group(SourceMethod::kMxfp4, std::move(group), where);
}

Result<SourceConfig> parse_modelopt(const Json& config, const std::string& where) {
  const JsonReader reader(config, where);
  NIBBLE_ASSIGN_OR_RETURN(const std::string algorithm, reader.required_string("quant_algo"));
  SourceGroup group;
  group.number = Number::kFloat;
  if (algorithm == "NVFP4") {
    NIBBLE_ASSIGN_OR_RETURN(group.group_size, reader.optional_int("group_size", 16));
    group.bits = 4;
    group.strategy = Strategy::kGroup;
    if (group.group_size != 16) {
      return unsupported_at(
          where, fmt::format("field group_size: {}; blocks of NVFP4 have 16", group.group_size));
    }
  } else if (algorithm == "FP8") {
    group.bits = 8;
  } else {
    return unsupported_at(where, fmt::format("field quant_algo: \"{}\" is not read, only NVFP4 and "
                                             "FP8",
                                             algorithm));
  }
  return one_group(SourceMethod::kModelOpt, std::move(group), where);
}

constexpr std::array<SourceDialect, 7> kDialects = {{
    {"compressed-tensors", SourceMethod::kCompressedTensors,
     "*.weight_packed, or *.weight in I8 or F8_E4M3", parse_compressed_tensors_source},
    {"gptq", SourceMethod::kGptq, "*.qweight", parse_gptq},
    {"awq", SourceMethod::kAwq, "*.qweight", parse_awq},
    {"fp8", SourceMethod::kFp8, "*.weight in F8_E4M3", parse_fp8},
    {"mxfp4", SourceMethod::kMxfp4, "*_blocks in U8", parse_mxfp4},
    {"quark", SourceMethod::kQuark, "*.weight in I32, I8, U8 or F8_E4M3", parse_quark_source},
    {"modelopt", SourceMethod::kModelOpt, "*.weight in U8 or F8_E4M3", parse_modelopt},
}};

}  // namespace

std::span<const SourceDialect> source_dialects() { return kDialects; }

Status corrupt_at(std::string_view where, std::string_view what) {
  return make_error(StatusCode::kCorrupt, "{}: {}", where, what);
}

Status unsupported_at(std::string_view where, std::string_view what) {
  return make_error(StatusCode::kUnsupported, "{}: {}", where, what);
}

bool is_absent(const Json* value) {
  return value == nullptr || value->is_null() || (value->is_object() && value->as_object().empty());
}

}  // namespace nibble
