#include "server/chat_body.h"

#include <utility>

#include <fmt/format.h>

#include "base/log.h"

namespace nibble {

ApiError renamed(ApiError error, const FieldNames& names) {
  for (const auto& [chat, ours] : names) {
    if (error.param == chat) {
      const bool named = error.message.starts_with(fmt::format("{}:", chat));
      error.message = named ? std::string(ours) + error.message.substr(chat.size())
                            : fmt::format("{}: {}", ours, error.message);
      error.param = ours;
      break;
    }
  }
  return error;
}

std::string_view without_billing_line(std::string_view system) {
  if (!system.starts_with("x-anthropic-billing-header:")) {
    return system;
  }
  const size_t end = system.find('\n');
  return end == std::string_view::npos ? std::string_view() : system.substr(end + 1);
}

void set_tools(FieldReader& fields, const ToolOfChat& tool_of_chat, Json& chat) {
  const Json* tools = fields.find("tools");
  if (tools == nullptr) {
    return;
  }
  if (!tools->is_array()) {
    fields.fail("tools", "tools: expected an array");
    return;
  }
  JsonArray list;
  for (size_t i = 0; i < tools->as_array().size(); ++i) {
    Json tool = tool_of_chat(tools->as_array()[i], fmt::format("tools[{}]", i));
    if (!tool.is_null()) {
      list.push_back(std::move(tool));
    }
  }
  if (!list.empty()) {
    chat.set("tools", std::move(list));
  }
}

void leave_out_tool(FieldReader& fields,
                    const Json& tool,
                    Strictness strictness,
                    IgnoredFields& ignored) {
  NIBBLE_LOG(kWarning, "a tool is left out: this server has none of the type {}",
             Json(shown(member_type(tool))).dump());
  ignore_field(fields, kOtherTools, strictness, ignored);
}

Json function_object(Json function) {
  return Json::object({{"type", "function"}, {"function", std::move(function)}});
}

std::string_view member_type(const Json& object) {
  const Json* type = object.find("type");
  return type != nullptr && type->is_string() ? std::string_view(type->as_string()) : "";
}

std::string text_member(FieldReader& fields,
                        const Json& object,
                        const char* key,
                        const std::string& where) {
  const Json* value = object.find(key);
  if (value == nullptr || !value->is_string()) {
    fields.fail(where + "." + key, fmt::format("{}.{}: expected a string", where, key));
    return {};
  }
  return value->as_string();
}

}  // namespace nibble
