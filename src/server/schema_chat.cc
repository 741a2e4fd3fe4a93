#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "server/schema_routes.h"

namespace nibble {
namespace {

void check_message(FieldReader& fields, const Json& message, size_t index) {
  const std::string where = fmt::format("messages[{}]", index);
  if (!message.is_object()) {
    fields.fail(where, where + ": expected an object, got " + std::string(json_type_name(message)));
    return;
  }
  const Json* role = message.find("role");
  constexpr std::array kRoles = {"system", "developer", "user", "assistant", "tool", "function"};
  if (role == nullptr || !role->is_string()) {
    fields.fail(where + ".role", where + ".role: expected a string");
  } else if (std::find(kRoles.begin(), kRoles.end(), role->as_string()) == kRoles.end()) {
    fields.fail(where + ".role",
                fmt::format("{}.role: \"{}\" is not one of system, developer, user, assistant, "
                            "tool",
                            where, shown(role->as_string())));
  }
  const Json* calls = message.find("tool_calls");
  if (calls != nullptr && !calls->is_array()) {
    fields.fail(where + ".tool_calls", fmt::format("{}.tool_calls: expected an array, got {}",
                                                   where, json_type_name(*calls)));
  }
  const Json* content = message.find("content");
  if (content == nullptr) {
    // Clients send an answer without text back as it came: with a null, which is gone by now.
    const bool answer = role != nullptr && role->is_string() && role->as_string() == "assistant";
    if (calls == nullptr && !answer) {
      fields.fail(where + ".content", where + ".content: missing");
    }
  } else if (!content->is_string() && !content->is_array()) {
    fields.fail(where + ".content",
                fmt::format("{}.content: expected a string or an array of parts, got {}", where,
                            json_type_name(*content)));
  }
}

/// "image_url", for messages.
std::string type_of_part(const Json& part) {
  constexpr size_t kLongest = 40;
  const Json* type = part.find("type");
  return type != nullptr && type->is_string() && type->as_string().size() <= kLongest
             ? type->dump()
             : "that is not known";
}

/// Content given as text parts becomes one string, as templates expect it. Missing content (a turn
/// of tool calls only) becomes "".
void flatten_content(FieldReader& fields, Json& message, size_t index) {
  const Json* content = message.find("content");
  std::string text;
  if (content != nullptr && content->is_string()) {
    return;
  }
  if (content != nullptr && content->is_array()) {
    for (const Json& part : content->as_array()) {
      const Json* type = part.find("type");
      const Json* value = part.find("text");
      if (type == nullptr || !type->is_string() || type->as_string() != "text" ||
          value == nullptr || !value->is_string()) {
        fields.fail(
            fmt::format("messages[{}].content", index),
            fmt::format("messages[{}].content: a part of type {} is not supported, as models "
                        "answer to text alone; send parts {{\"type\": \"text\", "
                        "\"text\": \"...\"}}",
                        index, type_of_part(part)));
        return;
      }
      text += value->as_string();
    }
  }
  message.set("content", text);
}

/// Clients send members that they have nothing for as null. To a template, a member that is null is
/// there all the same ("tool_calls" in message).
void drop_nulls(Json& message) {
  if (!message.is_object()) {
    return;
  }
  JsonObject kept;
  for (const auto& [key, value] : message.as_object()) {
    if (!value.is_null()) {
      kept.append(key, value);
    }
  }
  if (kept.size() != message.as_object().size()) {
    message = std::move(kept);
  }
}

void read_messages(FieldReader& fields, GenerationRequest& request) {
  const Json* messages = fields.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->as_array().empty()) {
    fields.fail("messages", "messages: expected an array with at least one message");
    return;
  }
  request.messages = *messages;
  JsonArray& list = request.messages.as_array();
  for (size_t i = 0; i < list.size() && !fields.error(); ++i) {
    drop_nulls(list[i]);
    check_message(fields, list[i], i);
    if (!fields.error()) {
      flatten_content(fields, list[i], i);
    }
  }
}

/// Names of functions, each once.
void read_functions(FieldReader& fields, const JsonArray& tools, GenerationRequest& request) {
  for (size_t i = 0; i < tools.size(); ++i) {
    const std::string where = fmt::format("tools[{}]", i);
    const Json* type = tools[i].find("type");
    const Json* function = tools[i].find("function");
    const Json* name = function != nullptr ? function->find("name") : nullptr;
    if (type == nullptr || !type->is_string() || type->as_string() != "function") {
      fields.fail(where + ".type", where + ".type: expected \"function\"");
    } else if (name == nullptr || !name->is_string() || name->as_string().empty()) {
      fields.fail(where + ".function.name",
                  where + ".function.name: expected a string with a name");
    } else if (std::ranges::find(request.functions, name->as_string()) != request.functions.end()) {
      fields.fail(where + ".function.name",
                  where + ".function.name: another tool has this name; give each its own");
    } else {
      request.functions.push_back(name->as_string());
    }
  }
}

/// "required", or an object that names a function.
void read_required_calls(FieldReader& fields, const Json& choice, GenerationRequest& request) {
  request.calls.required = true;
  if (!choice.is_string() || choice.as_string() != "required") {
    const Json* function = choice.find("function");
    const Json* name = function != nullptr ? function->find("name") : nullptr;
    if (name == nullptr || !name->is_string()) {
      fields.fail("tool_choice",
                  "tool_choice: expected \"none\", \"auto\", \"required\" or {\"type\": "
                  "\"function\", \"function\": {\"name\": ...}}");
      return;
    }
    request.calls.function = name->as_string();
    if (std::ranges::find(request.functions, name->as_string()) == request.functions.end()) {
      fields.fail("tool_choice", "tool_choice: no tool has the name that it asks for");
    }
  }
  if (request.functions.empty()) {
    fields.fail("tool_choice", "tool_choice: a call is required, but there are no tools");
  }
}

void read_tools(FieldReader& fields, GenerationRequest& request) {
  if (const Json* tools = fields.find("tools")) {
    if (!tools->is_array()) {
      fields.fail("tools", "tools: expected an array");
      return;
    }
    if (!tools->as_array().empty()) {
      request.tools = *tools;
      read_functions(fields, tools->as_array(), request);
    }
  }
  fields.boolean("parallel_tool_calls", request.parallel_tool_calls);
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr) {
    return;
  }
  if (choice->is_string() && choice->as_string() == "none") {
    request.tools = Json();
    request.functions.clear();
  } else if (!choice->is_string() || choice->as_string() != "auto") {
    read_required_calls(fields, *choice, request);
  }
}

void read_template_arguments(FieldReader& fields,
                             const SchemaOptions& options,
                             GenerationRequest& request) {
  request.template_arguments = options.template_arguments;
  const Json* arguments = fields.find("chat_template_kwargs");
  if (arguments == nullptr) {
    return;
  }
  if (!arguments->is_object()) {
    fields.fail("chat_template_kwargs", "chat_template_kwargs: expected an object");
    return;
  }
  for (const auto& [key, value] : arguments->as_object()) {
    request.template_arguments.set(key, value);
  }
}

/// reasoning_effort reaches the template by its own name, and "none" as what templates call it.
void read_reasoning(FieldReader& fields, GenerationRequest& request) {
  fields.boolean("separate_reasoning", request.separate_reasoning);
  fields.boolean("include_reasoning", request.include_reasoning);
  std::string effort;
  fields.text("reasoning_effort", effort);
  if (effort.empty()) {
    return;
  }
  constexpr std::array kEfforts = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
  if (std::ranges::find(kEfforts, effort) == kEfforts.end()) {
    fields.fail("reasoning_effort",
                "reasoning_effort: expected none, minimal, low, medium, high, xhigh or max");
    return;
  }
  const auto set = [&](const char* name, const Json& value) {
    if (request.template_arguments.find(name) == nullptr) {  // chat_template_kwargs come first
      request.template_arguments.set(name, value);
    }
  };
  set("reasoning_effort", effort);
  if (effort == "none") {
    set("enable_thinking", false);
    set("thinking", false);
  }
}

/// The last message is left open instead of a new one begun.
void read_continuation(FieldReader& fields, GenerationRequest& request) {
  fields.boolean("continue_final_message", request.continue_final_message);
  if (!request.continue_final_message) {
    return;
  }
  if (fields.find("add_generation_prompt") != nullptr && request.add_generation_prompt) {
    fields.fail("continue_final_message",
                "continue_final_message: cannot be true together with add_generation_prompt");
  }
  request.add_generation_prompt = false;
}

void read_modalities(FieldReader& fields) {
  std::vector<std::string> modalities;
  if (!fields.texts("modalities", modalities) ||
      std::ranges::any_of(modalities, [](const std::string& name) { return name != "text"; })) {
    fields.fail("modalities", "modalities: only [\"text\"] is supported");
  }
}

}  // namespace

void read_chat_fields(FieldReader& fields,
                      const SchemaOptions& options,
                      GenerationRequest& request) {
  read_messages(fields, request);
  read_tools(fields, request);
  read_template_arguments(fields, options, request);
  read_reasoning(fields, request);
  fields.boolean("add_generation_prompt", request.add_generation_prompt);
  if (request.max_tokens == 0) {
    fields.fail("max_tokens", "max_tokens: must be at least 1; /v1/completions takes 0");
  }
  fields.refuse("chat_template", "give the template to the server with --chat-template");
  read_continuation(fields, request);
  read_modalities(fields);
  bool logprobs = false;
  int64_t top = 0;
  fields.boolean("logprobs", logprobs);
  fields.integer("top_logprobs", 0, kMaxLogprobs, top);
  if (top > 0 && !logprobs) {
    fields.fail("top_logprobs", "top_logprobs: needs logprobs to be true");
  }
  request.logprobs = logprobs ? static_cast<int>(top) : -1;
  request.add_special_tokens = false;
}

}  // namespace nibble
