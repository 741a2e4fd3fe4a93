#include <algorithm>
#include <array>
#include <limits>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "server/chat_body.h"
#include "server/schema_routes.h"

namespace nibble {
namespace {

constexpr std::array<std::string_view, 15> kFields = {
    "model",         "messages",       "max_tokens", "system",      "tools", "tool_choice",
    "thinking",      "stop_sequences", "stream",     "temperature", "top_p", "top_k",
    "output_config", "cache_control",  "timeout"};  // prompts are kept whether they
                                                    // ask for it or not
constexpr std::array kIgnored = {
    IgnoredRow{"metadata", {"{}"}}, IgnoredRow{"service_tier", {"\"auto\"", "\"standard_only\""}},
    IgnoredRow{"inference_geo"},    IgnoredRow{"speed", {"\"standard\""}},
    IgnoredRow{"betas", {"[]"}},    IgnoredRow{"context_management"},
    IgnoredRow{"container"},        IgnoredRow{"mcp_servers", {"[]"}},
    IgnoredRow{"diagnostics"},
};

/// One conversion. Errors go to fields_.
class MessagesReader final {
 public:
  MessagesReader(const Json& body, Strictness strictness)
      : body_(body), strictness_(strictness), fields_(body) {}

  ChatBody read();

 private:
  void check_members();
  void read_system();
  void read_messages();
  void read_message(const Json& message, const std::string& where);
  void read_user(const JsonArray& blocks, const std::string& where);
  void read_assistant(const JsonArray& blocks, const std::string& where);
  void read_call(const Json& block, const std::string& where, JsonArray& calls);
  Json tool_of_chat(const Json& tool, const std::string& where);
  void read_tool_choice();
  void read_thinking();
  void read_output();
  void read_stop();
  void copy(const char* key);
  void add(const char* role, std::string content);
  [[nodiscard]] std::string text_of(const Json& content, const std::string& where);
  [[nodiscard]] std::string member(const Json& object, const char* key, const std::string& where);
  void refuse_block(const Json& block, const std::string& where, std::string_view expected);

  const Json& body_;
  const Strictness strictness_;
  FieldReader fields_;
  IgnoredFields ignored_;
  Json chat_ = JsonObject();
  JsonArray messages_;
};

std::string MessagesReader::member(const Json& object, const char* key, const std::string& where) {
  return text_member(fields_, object, key, where);
}

void MessagesReader::refuse_block(const Json& block,
                                  const std::string& where,
                                  std::string_view expected) {
  const std::string_view type = member_type(block);
  fields_.fail(where, fmt::format("{}: blocks of the type \"{}\" are not supported here; send {}",
                                  where, shown(type), expected));
}

/// The text of a string, or of an array of blocks of text.
std::string MessagesReader::text_of(const Json& content, const std::string& where) {
  if (content.is_string()) {
    return content.as_string();
  }
  std::string text;
  if (!content.is_array()) {
    fields_.fail(where, where + ": expected a string or an array of blocks");
    return text;
  }
  for (const Json& block : content.as_array()) {
    if (member_type(block) != "text") {
      refuse_block(block, where, "text");
      return text;
    }
    text += member(block, "text", where);
  }
  return text;
}

void MessagesReader::add(const char* role, std::string content) {
  messages_.push_back(Json::object({{"role", role}, {"content", std::move(content)}}));
}

void MessagesReader::read_system() {
  const Json* system = fields_.find("system");
  if (system == nullptr) {
    return;
  }
  std::string all;
  const auto append = [&](std::string_view text) {
    text = without_billing_line(text);
    all += (all.empty() || text.empty() ? "" : "\n") + std::string(text);
  };
  if (system->is_array()) {
    for (const Json& block : system->as_array()) {
      append(text_of(JsonArray{block}, "system"));
    }
  } else {
    append(text_of(*system, "system"));
  }
  if (!all.empty()) {
    add("system", std::move(all));
  }
}

/// Results of tools are messages of their own, in the order in which they come.
void MessagesReader::read_user(const JsonArray& blocks, const std::string& where) {
  std::string text;
  bool has_text = blocks.empty();
  const auto flush = [&] {
    if (std::exchange(has_text, false)) {
      add("user", std::exchange(text, {}));
    }
  };
  for (size_t i = 0; i < blocks.size() && !fields_.error(); ++i) {
    const Json& block = blocks[i];
    const std::string here = fmt::format("{}.content[{}]", where, i);
    if (member_type(block) == "text") {
      text += member(block, "text", here);
      has_text = true;
    } else if (member_type(block) == "tool_result") {
      flush();
      const Json* content = block.find("content");
      const bool empty = content == nullptr || content->is_null();
      messages_.push_back(
          Json::object({{"role", "tool"},
                        {"tool_call_id", member(block, "tool_use_id", here)},
                        {"content", empty ? "" : text_of(*content, here + ".content")}}));
    } else {
      refuse_block(block, here, "text or tool_result");
    }
  }
  flush();
}

void MessagesReader::read_call(const Json& block, const std::string& where, JsonArray& calls) {
  const Json* input = block.find("input");
  if (input == nullptr || !input->is_object()) {
    fields_.fail(where + ".input", where + ".input: expected an object");
    return;
  }
  calls.push_back(Json::object({{"id", member(block, "id", where)},
                                {"type", "function"},
                                {"function", Json::object({{"name", member(block, "name", where)},
                                                           {"arguments", input->dump()}})}}));
}

void MessagesReader::read_assistant(const JsonArray& blocks, const std::string& where) {
  std::string text, thinking;
  JsonArray calls;
  for (size_t i = 0; i < blocks.size() && !fields_.error(); ++i) {
    const Json& block = blocks[i];
    const std::string here = fmt::format("{}.content[{}]", where, i);
    if (member_type(block) == "text") {
      text += member(block, "text", here);
    } else if (member_type(block) == "thinking") {
      thinking += member(block, "thinking", here);
    } else if (member_type(block) == "tool_use") {
      read_call(block, here, calls);
    } else {
      refuse_block(block, here, "text, thinking or tool_use");
    }
  }
  Json message = Json::object({{"role", "assistant"}, {"content", std::move(text)}});
  if (!thinking.empty()) {
    message.set("reasoning_content", thinking);
    message.set("reasoning", std::move(thinking));
  }
  if (!calls.empty()) {
    message.set("tool_calls", std::move(calls));
  }
  messages_.push_back(std::move(message));
}

void MessagesReader::read_message(const Json& message, const std::string& where) {
  if (!message.is_object()) {
    fields_.fail(where, where + ": expected an object");
    return;
  }
  const std::string role = member(message, "role", where);
  const Json* content = message.find("content");
  if (content == nullptr || (!content->is_string() && !content->is_array())) {
    fields_.fail(where + ".content", where + ".content: expected a string or an array of blocks");
  } else if (role == "system") {
    add("system", text_of(*content, where + ".content"));
  } else if (role != "user" && role != "assistant") {
    fields_.fail(where + ".role", where + ".role: expected user, assistant or system");
  } else if (content->is_string()) {
    add(role.c_str(), content->as_string());
  } else if (role == "user") {
    read_user(content->as_array(), where);
  } else {
    read_assistant(content->as_array(), where);
  }
}

void MessagesReader::read_messages() {
  const Json* messages = fields_.find("messages");
  if (messages == nullptr || !messages->is_array() || messages->as_array().empty()) {
    fields_.fail("messages", "messages: expected an array with at least one message");
    return;
  }
  const JsonArray& list = messages->as_array();
  for (size_t i = 0; i < list.size() && !fields_.error(); ++i) {
    read_message(list[i], fmt::format("messages[{}]", i));
  }
  if (fields_.error()) {
    return;
  }
  if (messages_.back().find("role")->as_string() == "assistant") {  // its text is to be continued
    chat_.set("continue_final_message", true);
    chat_.set("add_generation_prompt", false);
  }
  chat_.set("messages", std::move(messages_));
}

Json MessagesReader::tool_of_chat(const Json& tool, const std::string& where) {
  if (!tool.is_object()) {
    fields_.fail(where, where + ": expected an object");
    return {};
  }
  const std::string_view type = member_type(tool);
  if (!type.empty() && type != "custom") {
    leave_out_tool(fields_, tool, strictness_, ignored_);
    return {};
  }
  Json function = Json::object({{"name", member(tool, "name", where)}});
  if (const Json* description = tool.find("description")) {
    function.set("description", *description);
  }
  const Json* schema = tool.find("input_schema");
  if (schema == nullptr || !schema->is_object()) {
    fields_.fail(where + ".input_schema", where + ".input_schema: expected an object");
    return {};
  }
  function.set("parameters", *schema);
  const Json* strict = tool.find("strict");
  if (strict != nullptr && strict->is_bool()) {
    function.set("strict", *strict);
  }
  return function_object(std::move(function));
}

/// What a chat can choose is for the chat to say.
void MessagesReader::read_tool_choice() {
  const Json* choice = fields_.find("tool_choice");
  if (choice == nullptr) {
    return;
  }
  const std::string_view type = member_type(*choice);
  if (type == "auto" || type == "none") {
    chat_.set("tool_choice", type);
  } else if (type == "any") {
    chat_.set("tool_choice", "required");
  } else if (type == "tool") {
    const Json function = Json::object({{"name", member(*choice, "name", "tool_choice")}});
    chat_.set("tool_choice", function_object(function));
  } else {
    fields_.fail("tool_choice",
                 "tool_choice: expected an object whose type is auto, any, tool or "
                 "none");
  }
  if (choice->is_object()) {
    bool one = false;
    FieldReader inner(*choice);
    inner.boolean("disable_parallel_tool_use", one);
    if (inner.error()) {
      fields_.fail("tool_choice." + inner.error()->param, inner.error()->message);
    }
    chat_.set("parallel_tool_calls", !one);
  }
}

void MessagesReader::read_thinking() {
  const Json* thinking = fields_.find("thinking");
  if (thinking == nullptr) {
    return;
  }
  const std::string_view type = member_type(*thinking);
  const bool enabled = type == "enabled";
  if (!enabled && type != "disabled" && type != "adaptive") {
    fields_.fail("thinking",
                 "thinking: expected an object whose type is enabled, disabled or adaptive");
    return;
  }
  FieldReader inner(*thinking);
  int64_t budget = 0;
  inner.integer("budget_tokens", 1, std::numeric_limits<int32_t>::max(), budget);
  if (inner.error()) {
    fields_.fail("thinking." + inner.error()->param, "thinking." + inner.error()->message);
  }
  if (enabled && budget > 0) {
    chat_.set("thinking_token_budget", budget);
  }
  const Json* display = inner.find("display");
  if (display != nullptr &&
      display->dump() != "\"summarized\"") {  // thoughts are shown as they are
    ignore_field(fields_, "thinking.display", strictness_, ignored_);
  }
  if (type != "adaptive") {
    chat_.set("chat_template_kwargs",
              Json::object({{"enable_thinking", enabled}, {"thinking", enabled}}));
    chat_.set("include_reasoning", enabled);
  }
}

void MessagesReader::read_output() {
  const Json* output = fields_.find("output_config");
  if (output == nullptr) {
    return;
  }
  if (!output->is_object()) {
    fields_.fail("output_config", "output_config: expected an object");
    return;
  }
  FieldReader inner(*output);
  std::string effort;
  inner.text("effort", effort);
  if (inner.error()) {
    fields_.fail("output_config." + inner.error()->param, inner.error()->message);
  } else if (!effort.empty()) {
    chat_.set("reasoning_effort", effort);
  }
  if (inner.find("task_budget") != nullptr) {
    ignore_field(fields_, "output_config.task_budget", strictness_, ignored_);
  }
  if (const Json* format = inner.find("format")) {
    const Json* schema = format->find("schema");
    if (member_type(*format) != "json_schema" || schema == nullptr) {
      fields_.fail("output_config.format",
                   "output_config.format: expected {\"type\": \"json_schema\", \"schema\": {...}}");
      return;
    }
    const Json named = Json::object({{"name", "answer"}, {"schema", *schema}, {"strict", true}});
    chat_.set("response_format", Json::object({{"type", "json_schema"}, {"json_schema", named}}));
  }
}

void MessagesReader::read_stop() {
  const Json* stop = fields_.find("stop_sequences");
  if (stop == nullptr) {
    return;
  }
  if (!stop->is_array()) {
    fields_.fail("stop_sequences", "stop_sequences: expected an array of strings");
  } else if (!stop->as_array().empty()) {
    chat_.set("stop", *stop);
  }
}

void MessagesReader::copy(const char* key) {
  if (const Json* value = fields_.find(key)) {
    chat_.set(key, *value);
  }
}

void MessagesReader::check_members() {
  const auto known = [](std::string_view key) {
    return std::ranges::find(kFields, key) != kFields.end() ||
           std::ranges::find(kIgnored, key, &IgnoredRow::name) != kIgnored.end();
  };
  ignored_.unknown = check_unknown_fields(fields_, body_, known, strictness_);
  read_ignored(fields_, kIgnored, strictness_, ignored_);
}

ChatBody MessagesReader::read() {
  check_members();
  read_system();
  read_messages();
  set_tools(
      fields_,
      [this](const Json& tool, const std::string& where) { return tool_of_chat(tool, where); },
      chat_);
  read_tool_choice();
  read_thinking();
  read_output();
  read_stop();
  int64_t most = 0;
  fields_.integer("max_tokens", 1, std::numeric_limits<int32_t>::max(), most);
  for (const char* key :
       {"model", "max_tokens", "stream", "temperature", "top_p", "top_k", "timeout"}) {
    copy(key);
  }
  if (fields_.error()) {
    return *fields_.error();
  }
  return TranslatedBody{std::move(chat_), std::move(ignored_)};
}

}  // namespace

ChatBody chat_of_messages(const Json& body, Strictness strictness) {
  return MessagesReader(body, strictness).read();
}

}  // namespace nibble
