#include "checkpoint/quant_config.h"

#include <algorithm>
#include <array>
#include <memory>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/file.h"
#include "checkpoint/announced.h"
#include "checkpoint/dialects/compressed_tensors.h"
#include "checkpoint/dialects/foreign_config.h"
#include "checkpoint/quant_config_writer.h"

namespace nibble {
namespace {

constexpr std::string_view kPatternPrefix = "re:";
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

// Patterns were compiled once by parse_quant_config(), so a failure here is only the step limit.
bool matches(std::string_view pattern, std::string_view module) {
  const auto result = matches_module(pattern, module);
  return result.ok() && *result;
}

}  // namespace

Result<bool> matches_module(std::string_view pattern, std::string_view module) {
  if (pattern.substr(0, kPatternPrefix.size()) == kPatternPrefix) {
    return matches_pattern(pattern.substr(kPatternPrefix.size()), module);
  }
  return pattern == module;
}

const QuantGroup* QuantConfig::group_for(std::string_view module) const {
  for (const QuantGroup& group : groups) {
    if (std::any_of(group.targets.begin(), group.targets.end(),
                    [&](const std::string& target) { return matches(target, module); })) {
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
  return std::any_of(ignore.begin(), ignore.end(), [&](const std::string& pattern) {
    return pattern == kLinearClass || matches(pattern, module);
  });
}

Result<QuantConfig> parse_quant_config(const Json& model_config, std::string_view where) {
  if (!model_config.is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: not a JSON object", where);
  }
  const Json* found = model_config.find("quantization_config");
  if (found == nullptr || found->is_null()) {
    const Json* text = model_config.find("text_config");
    found = text == nullptr ? nullptr : text->find("quantization_config");
  }
  if (found == nullptr || found->is_null()) {
    return QuantConfig{};
  }
  const std::string path = fmt::format("{}: quantization_config", where);
  if (!found->is_object()) {
    return make_error(StatusCode::kCorrupt, "{}: not a JSON object", path);
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string method,
                          JsonReader(*found, path).required_string("quant_method"));
  if (method != compressed_tensors::kMethod) {
    return parse_foreign_config(*found, path);
  }
  auto config = compressed_tensors::parse_config(*found, path);
  if (config.status().code() == StatusCode::kUnsupported) {
    return make_error(StatusCode::kUnsupported,
                      "{}; quantize the checkpoint again: nibble quantize SRC DST --scheme NAME",
                      config.status().message());
  }
  return config;
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
  auto config = parse_quant_config(*json, "config.json");
  if (config.ok() && !config->groups.empty()) {
    const SourceMethod method = config->source.method == SourceMethod::kNone
                                    ? SourceMethod::kCompressedTensors
                                    : config->source.method;
    NIBBLE_RETURN_IF_ERROR(check_announced(reader, method, "config.json: quantization_config"));
  }
  return config;
}

Json quant_config_json(const QuantScheme& scheme, const std::vector<std::string>& ignore) {
  auto json = stored_config_json({.uses = {{scheme, {}}}, .ignore = ignore});
  CHECK(json.ok());
  return std::move(json).value();
}

}  // namespace nibble
