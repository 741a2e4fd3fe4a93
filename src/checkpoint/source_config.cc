#include "checkpoint/source_config.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fnmatch.h>

#include "base/file.h"
#include "checkpoint/dialects/source_dialects.h"
#include "checkpoint/quant_config.h"

namespace nibble {
namespace {

constexpr std::string_view kGlobPrefix = "glob:";
constexpr std::string_view kLinearClass = "Linear";

bool names_module(const std::string& target, const std::string& module) {
  if (target.starts_with(kGlobPrefix)) {
    return ::fnmatch(target.c_str() + kGlobPrefix.size(), module.c_str(), 0) == 0;
  }
  const auto result = matches_module(target, module);
  return result.ok() && *result;
}

struct Found {
  Json json;
  std::string where;
  bool beside = false;
};

const Json* find_object(const Json* json, std::string_view key) {
  const Json* value = json == nullptr ? nullptr : json->find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

Result<Json> read_json(const std::string& folder, std::string_view name) {
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(fmt::format("{}/{}", folder, name)));
  auto json = Json::parse(text);
  return json.ok() ? json : json.status().with_context(name);
}

// ModelOpt puts its config below "quantization", AutoGPTQ at the top of a file without a method.
Result<Found> find_config(const Json& config, const std::string& folder) {
  constexpr std::string_view kKey = "quantization_config";
  if (const Json* found = find_object(&config, kKey)) {
    return Found{*found, "config.json: quantization_config", false};
  }
  if (const Json* found = find_object(find_object(&config, "text_config"), kKey)) {
    return Found{*found, "config.json: text_config.quantization_config", false};
  }
  if (file_exists(folder + "/hf_quant_config.json")) {
    NIBBLE_ASSIGN_OR_RETURN(const Json json, read_json(folder, "hf_quant_config.json"));
    const Json* found = find_object(&json, "quantization");
    if (found == nullptr || !found->is_object()) {
      return make_error(StatusCode::kCorrupt,
                        "hf_quant_config.json: field quantization is missing or no object");
    }
    Json copy = *found;
    copy.set("quant_method", "modelopt");
    return Found{std::move(copy), "hf_quant_config.json: quantization", true};
  }
  if (file_exists(folder + "/quantize_config.json")) {
    NIBBLE_ASSIGN_OR_RETURN(Json json, read_json(folder, "quantize_config.json"));
    if (json.is_object() && find_object(&json, "quant_method") == nullptr) {
      json.set("quant_method", "gptq");
    }
    return Found{std::move(json), "quantize_config.json", true};
  }
  return Found{};
}

}  // namespace

const SourceGroup* SourceConfig::group_for(std::string_view module) const {
  const std::string name(module);
  for (const SourceGroup& group : groups) {
    if (std::any_of(group.targets.begin(), group.targets.end(),
                    [&](const std::string& target) { return names_module(target, name); })) {
      return &group;
    }
  }
  for (const SourceGroup& group : groups) {
    if (std::find(group.targets.begin(), group.targets.end(), kLinearClass) !=
        group.targets.end()) {
      return &group;
    }
  }
  return nullptr;
}

Result<SourceConfig> read_source_config(const Json& config, const std::string& folder) {
  if (!config.is_object()) {
    return make_error(StatusCode::kCorrupt, "config.json: not a JSON object");
  }
  NIBBLE_ASSIGN_OR_RETURN(const Found found, find_config(config, folder));
  if (found.json.is_null()) {
    return SourceConfig{};
  }
  auto result = parse_source_config(found.json, found.where);
  if (result.ok()) {
    result->beside = found.beside;
  }
  return result;
}

Result<SourceConfig> parse_source_config(const Json& config, const std::string& where) {
  if (!config.is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: not a JSON object", where);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string method,
                          JsonReader(config, where).required_string("quant_method"));
  for (const SourceDialect& dialect : source_dialects()) {
    if (dialect.name == method) {
      auto result = dialect.parse(config, where);
      if (result.ok()) {
        result->where = where;
      }
      return result;
    }
  }
  return make_error(StatusCode::kUnsupported,
                    "{}: quant_method \"{}\" is not read; known are compressed-tensors, gptq, awq, "
                    "fp8, mxfp4, quark and modelopt. Quantize from the unquantized checkpoint",
                    where, method);
}

}  // namespace nibble
