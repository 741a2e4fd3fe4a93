#include "checkpoint/quant_config.h"

#include <algorithm>
#include <array>
#include <memory>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/file.h"
#include "base/glob.h"
#include "checkpoint/announced.h"
#include "checkpoint/dialects/dialects.h"

namespace nibble {
namespace {

constexpr std::string_view kPatternPrefix = "re:";
constexpr std::string_view kGlobPrefix = "glob:";
// A linear layer is the only class of module that we store quantized.
constexpr std::string_view kLinearClass = "Linear";
constexpr uint32_t kMatchLimit = 100'000;

Result<bool> matches_pattern(std::string_view pattern, std::string_view text) {
  int error = 0;
  PCRE2_SIZE offset = 0;
  const std::unique_ptr<pcre2_code, decltype(&pcre2_code_free)> code(
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_ANCHORED,
                    &error, &offset, nullptr),
      pcre2_code_free);
  if (code == nullptr) {
    std::array<PCRE2_UCHAR, 128> message{};
    pcre2_get_error_message(error, message.data(), message.size());
    return make_error(StatusCode::kInvalidArgument, "pattern \"{}\": {} at offset {}", pattern,
                      reinterpret_cast<const char*>(message.data()), offset);
  }
  const std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data(
      pcre2_match_data_create_from_pattern(code.get(), nullptr), pcre2_match_data_free);
  const std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context(
      pcre2_match_context_create(nullptr), pcre2_match_context_free);
  pcre2_set_match_limit(context.get(), kMatchLimit);
  const int outcome = pcre2_match(code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()),
                                  text.size(), 0, 0, data.get(), context.get());
  if (outcome < 0 && outcome != PCRE2_ERROR_NOMATCH) {
    return make_error(StatusCode::kInvalidArgument,
                      "pattern \"{}\" needs too many steps; write a simpler one", pattern);
  }
  return outcome >= 0;
}

// Patterns were compiled once when they were read, so a failure here is only the step limit.
bool matches(const std::string& pattern, const std::string& module) {
  if (pattern.starts_with(kGlobPrefix)) {
    return matches_glob(std::string_view(pattern).substr(kGlobPrefix.size()), module);
  }
  const auto result = matches_module(pattern, module);
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

/// Whether two values say the same: members in any order, null ones like absent ones.
bool says_the_same(const Json* a, const Json* b) {
  const auto absent = [](const Json* value) { return value == nullptr || value->is_null(); };
  if (absent(a) || absent(b)) {
    return absent(a) && absent(b);
  }
  if (!a->is_object() || !b->is_object()) {
    return a->dump() == b->dump();
  }
  const auto covers = [](const Json& some, const Json& other) {
    return std::ranges::all_of(some.as_object(), [&](const JsonObject::Member& member) {
      return says_the_same(&member.second, other.find(member.first));
    });
  };
  return covers(*a, *b) && covers(*b, *a);
}

// ModelOpt puts its config below "quantization", AutoGPTQ at the top of a file without a method.
Result<Found> find_config(const Json& config, const std::string& folder) {
  constexpr std::string_view kKey = "quantization_config";
  const Json* nested = find_object(find_object(&config, "text_config"), kKey);
  if (const Json* found = find_object(&config, kKey)) {
    if (nested != nullptr && !says_the_same(found, nested)) {
      return make_error(StatusCode::kCorrupt,
                        "config.json: quantization_config and text_config.quantization_config "
                        "differ, so that programs read the weights differently; remove the one "
                        "that does not describe them");
    }
    return Found{*found, "config.json: quantization_config", false};
  }
  if (const Json* found = nested) {
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

WeightCode code_of(const QuantGroup& group) {
  const bool four = group.bits == 4;
  if (group.number == QuantGroup::Number::kFloat) {
    return four ? WeightCode::kFp4E2M1 : WeightCode::kFp8E4M3;
  }
  return four ? WeightCode::kInt4 : WeightCode::kInt8;
}

}  // namespace

Result<bool> matches_module(std::string_view pattern, std::string_view module) {
  if (pattern.substr(0, kPatternPrefix.size()) == kPatternPrefix) {
    return matches_pattern(pattern.substr(kPatternPrefix.size()), module);
  }
  return pattern == module;
}

const QuantGroup* QuantConfig::group_for(std::string_view module) const {
  const std::string name(module);
  for (const QuantGroup& group : groups) {
    if (std::any_of(group.targets.begin(), group.targets.end(),
                    [&](const std::string& target) { return matches(target, name); })) {
      return &group;
    }
  }
  for (const QuantGroup& group : groups) {
    if (std::find(group.targets.begin(), group.targets.end(), kLinearClass) !=
        group.targets.end()) {
      return &group;
    }
  }
  return nullptr;
}

bool QuantConfig::ignores(std::string_view module) const {
  const std::string name(module);
  return std::any_of(ignore.begin(), ignore.end(), [&](const std::string& pattern) {
    return pattern == kLinearClass || matches(pattern, name);
  });
}

QuantScheme scheme_of(const QuantGroup& group) {
  QuantScheme scheme{.act = group.activations.format};
  WeightFormat& weight = scheme.weight;
  weight.code = code_of(group);
  weight.scale_per = ScalePer::kChannel;
  switch (group.strategy) {
    case QuantGroup::Strategy::kTensor:
      weight.scale_per = ScalePer::kTensor;
      break;
    case QuantGroup::Strategy::kChannel:
      break;
    case QuantGroup::Strategy::kGroup:
      if (group.group_size > 0) {
        weight.scale_per = ScalePer::kGroup;
        weight.group_size = static_cast<int>(group.group_size);
      }
      break;
    case QuantGroup::Strategy::kBlock:
      weight.scale_per = ScalePer::kBlock;
      weight.group_size = static_cast<int>(std::min(group.block_columns, kMostGroup));
      break;
  }
  weight.zero_points = group.symmetric ? ZeroPoints::kNone : ZeroPoints::kPerScale;
  scheme.name = scheme_name(weight, scheme.act);
  return scheme;
}

Result<QuantConfig> read_quant_config(const Json& config, const std::string& folder) {
  if (!config.is_object()) {
    return make_error(StatusCode::kCorrupt, "config.json: not a JSON object");
  }
  NIBBLE_ASSIGN_OR_RETURN(const Found found, find_config(config, folder));
  if (found.json.is_null()) {
    return QuantConfig{};
  }
  auto result = parse_quant_config(found.json, found.where);
  if (result.ok()) {
    result->beside = found.beside;
  }
  return result;
}

Result<QuantConfig> parse_quant_config(const Json& config, const std::string& where) {
  if (!config.is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: not a JSON object", where);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string method,
                          JsonReader(config, where).required_string("quant_method"));
  std::string known;
  for (const DialectRow* dialect : all_dialects()) {
    if (dialect->name == method) {
      auto result = dialect->read(config, where);
      if (result.ok()) {
        result->where = where;
      }
      return result;
    }
    known += known.empty() ? "" : ", ";
    known += dialect->name;
  }
  return make_error(StatusCode::kUnsupported,
                    "{}: quant_method \"{}\" is not read; known are {}. Quantize from the "
                    "unquantized checkpoint",
                    where, method, known);
}

Result<QuantConfig> load_quant_config(const CheckpointReader& reader) {
  const std::string path = reader.path() + "/config.json";
  if (!file_exists(path)) {
    return QuantConfig{};
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string text, read_file(path));
  const auto json = Json::parse(text);
  if (!json.ok()) {
    return json.status().with_context("config.json");
  }
  auto config = read_quant_config(*json, reader.path());
  if (config.ok() && !config->groups.empty() && !config->beside) {
    NIBBLE_RETURN_IF_ERROR(check_announced(reader, config->dialect, config->where));
  }
  return config;
}

Json quant_config_json(const QuantScheme& scheme, const std::vector<std::string>& ignore) {
  auto json = stored_config_json({.uses = {{scheme, {}}}, .ignore = ignore});
  CHECK(json.ok());
  return std::move(json).value();
}

}  // namespace nibble
