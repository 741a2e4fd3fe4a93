#include "text/answer/call_text.h"

#include <algorithm>
#include <utility>

#include "text/answer/json_extent.h"
#include "text/answer/trimmed_text.h"

namespace nibble {
namespace {

ParsedCalls one(std::optional<ToolCall> call) {
  if (!call) {
    return std::nullopt;
  }
  return std::vector<ToolCall>{*std::move(call)};
}

std::optional<ToolCall> make_call(std::string_view name,
                                  std::string_view arguments,
                                  std::string_view id = {}) {
  name = trim(name);
  auto text = arguments_text(arguments);
  if (name.empty() || name.find_first_of(kBlanks) != std::string_view::npos || !text) {
    return std::nullopt;
  }
  return ToolCall{std::string(name), *std::move(text), std::string(trim(id))};
}

/// "get_weather" of "functions.get_weather:0".
std::string_view kimi_name(std::string_view id) {
  constexpr std::string_view kNamespace = "functions.";
  if (id.starts_with(kNamespace)) {
    id.remove_prefix(kNamespace.size());
  }
  const size_t colon = id.rfind(':');
  const bool numbered = colon != std::string_view::npos && colon + 1 < id.size() &&
                        id.find_first_not_of("0123456789", colon + 1) == std::string_view::npos;
  return numbered ? id.substr(0, colon) : id;
}

}  // namespace

std::optional<std::string> arguments_text(std::string_view text) {
  text = trim(text);
  if (text.empty()) {
    return "{}";
  }
  const auto json = Json::parse(text);
  if (!json.ok() || !json->is_object()) {
    return std::nullopt;
  }
  return std::string(text);
}

std::optional<ToolCall> call_of(const Json& json) {
  const Json* name = json.find("name");
  const Json* arguments = json.find("arguments");
  const Json* id = json.find("id");
  arguments = arguments != nullptr ? arguments : json.find("parameters");
  if (name == nullptr || !name->is_string()) {
    return std::nullopt;
  }
  std::string text;
  if (arguments != nullptr && arguments->is_string()) {
    text = arguments->as_string();
  } else if (arguments != nullptr && !arguments->is_null()) {
    text = arguments->dump();
  }
  return make_call(name->as_string(), text,
                   id != nullptr && id->is_string() ? id->as_string() : std::string());
}

ParsedCalls parse_hermes_call(std::string_view body) {
  const auto json = Json::parse(trim(body));
  return json.ok() ? one(call_of(*json)) : std::nullopt;
}

ParsedCalls parse_kimi_call(std::string_view body) {
  constexpr std::string_view kArguments = "<|tool_call_argument_begin|>";
  const size_t at = body.find(kArguments);
  if (at == std::string_view::npos) {
    return std::nullopt;
  }
  const std::string_view id = trim(body.substr(0, at));
  return one(make_call(kimi_name(id), body.substr(at + kArguments.size()), id));
}

ParsedCalls parse_deepseek_call(std::string_view body) {
  constexpr std::string_view kSeparator = "<｜tool▁sep｜>";
  constexpr std::string_view kFence = "```";
  const size_t at = body.find(kSeparator);
  if (at == std::string_view::npos) {
    return std::nullopt;
  }
  const std::string_view head = trim(body.substr(0, at));
  std::string_view rest = trim(body.substr(at + kSeparator.size()));
  const size_t line = rest.find('\n');
  if (head != "function" || rest.starts_with('{') || line == std::string_view::npos) {
    return one(make_call(head, rest));
  }
  const std::string_view name = rest.substr(0, line);
  rest = trim(rest.substr(line));
  if (!rest.starts_with(kFence) || !rest.ends_with(kFence) || rest.size() < 2 * kFence.size()) {
    return std::nullopt;
  }
  rest.remove_prefix(kFence.size());
  rest.remove_suffix(kFence.size());
  if (rest.starts_with("json")) {
    rest.remove_prefix(4);
  }
  return one(make_call(name, rest));
}

ParsedCalls parse_mistral_calls(std::string_view body) {
  body = trim(body);
  if (body.starts_with('[') && !body.starts_with("[CALL_ID]") && !body.starts_with("[ARGS]")) {
    const auto json = Json::parse(body);
    if (!json.ok() || !json->is_array() || json->as_array().empty()) {
      return std::nullopt;
    }
    std::vector<ToolCall> calls;
    for (const Json& each : json->as_array()) {
      auto call = call_of(each);
      if (!call) {
        return std::nullopt;
      }
      calls.push_back(*std::move(call));
    }
    return calls;
  }
  constexpr std::string_view kId = "[CALL_ID]";
  constexpr std::string_view kArguments = "[ARGS]";
  const size_t arguments = body.find(kArguments);
  if (arguments == std::string_view::npos) {
    const size_t brace = body.find('{');
    return brace == std::string_view::npos
               ? std::nullopt
               : one(make_call(body.substr(0, brace), body.substr(brace)));
  }
  const std::string_view head = body.substr(0, arguments);
  const size_t id = head.find(kId);
  return one(make_call(head.substr(0, id), body.substr(arguments + kArguments.size()),
                       id == std::string_view::npos ? "" : head.substr(id + kId.size())));
}

ParsedCalls parse_llama_calls(std::string_view body, std::span<const std::string> functions) {
  std::vector<ToolCall> calls;
  for (body = trim(body); !body.empty(); body = trim(body)) {
    const size_t length = JsonExtent::length_of(body);
    const auto json = Json::parse(body.substr(0, length));
    auto call = length > 0 && json.ok() ? call_of(*json) : std::nullopt;
    if (!call || std::ranges::find(functions, call->name) == functions.end()) {
      return std::nullopt;
    }
    calls.push_back(*std::move(call));
    body = trim(body.substr(length));
    if (body.starts_with(';')) {
      body.remove_prefix(1);
    }
  }
  return calls.empty() ? ParsedCalls() : calls;
}

}  // namespace nibble
