#include "checkpoint/dialects/foreign_config.h"

#include <string_view>
#include <utility>

#include "checkpoint/dialects/source_dialects.h"

namespace nibble {
namespace {

Status cannot_run(const std::string& where, const std::string& what) {
  return make_error(StatusCode::kUnsupported,
                    "{}: {} cannot be run; quantize the checkpoint again: nibble quantize SRC DST "
                    "--scheme NAME",
                    where, what);
}

// "glob:" targets as patterns of QuantGroup; one that matches everything is the class Linear.
std::string pattern_of(std::string_view target) {
  constexpr std::string_view kGlob = "glob:";
  if (target == "glob:*") {
    return "Linear";
  }
  std::string pattern = "re:";
  for (const char c : target.substr(kGlob.size())) {
    if (c == '*') {
      pattern += ".*";
    } else if (c == '?') {
      pattern += '.';
    } else if (std::string_view(".+()^$|{}\\").find(c) != std::string_view::npos) {
      pattern += {'\\', c};
    } else {
      pattern += c;
    }
  }
  return pattern + "$";
}

Result<QuantGroup> quark_group(const SourceGroup& source) {
  if (!source.progressive) {
    return cannot_run(source.where, "weights other than INT4 over FP8");
  }
  QuantGroup group;
  group.weight = {WeightCode::kInt4, ScalePer::kChannel, 0, DType::kF32};
  group.act = ActFormat::kInt8Token;
  return group;
}

Result<QuantGroup> gptq_group(const SourceGroup& source) {
  if (!source.symmetric) {
    return cannot_run(source.where, "sym: false (zero points)");
  }
  QuantGroup group;
  group.weight = {WeightCode::kInt4, ScalePer::kChannel, 0, DType::kF32};
  if (source.group_size != -1) {
    group.weight.scale_per = ScalePer::kGroup;
    group.weight.group_size = static_cast<int>(source.group_size);
  }
  return group;
}

Result<QuantGroup> fp8_group(const SourceGroup& source, const Json& config) {
  const auto scheme =
      JsonReader(config, source.where).optional_string("activation_scheme", "dynamic");
  NIBBLE_RETURN_IF_ERROR(scheme.status());
  if (source.strategy == SourceGroup::Strategy::kBlock) {
    return cannot_run(source.where, "weight_block_size");
  }
  if (*scheme != "dynamic") {
    return cannot_run(source.where, fmt::format("activation_scheme \"{}\"", *scheme));
  }
  QuantGroup group;
  group.weight = {WeightCode::kFp8E4M3, ScalePer::kChannel, 0, DType::kF32};
  group.act = ActFormat::kFp8Token;
  return group;
}

Result<QuantGroup> group_of(const SourceConfig& source,
                            const SourceGroup& group,
                            const Json& config) {
  switch (source.method) {
    case SourceMethod::kQuark:
      return quark_group(group);
    case SourceMethod::kGptq:
      return gptq_group(group);
    case SourceMethod::kFp8:
      return fp8_group(group, config);
    default:
      return cannot_run(group.where, "this quant_method");
  }
}

}  // namespace

Result<QuantConfig> parse_foreign_config(const Json& config, const std::string& where) {
  NIBBLE_ASSIGN_OR_RETURN(SourceConfig source, parse_source_config(config, where));
  QuantConfig result;
  for (const SourceGroup& each : source.groups) {
    NIBBLE_ASSIGN_OR_RETURN(QuantGroup group, group_of(source, each, config));
    for (const std::string& target : each.targets) {
      group.targets.push_back(pattern_of(target));
    }
    result.groups.push_back(std::move(group));
  }
  result.source = std::move(source);
  return result;
}

}  // namespace nibble
