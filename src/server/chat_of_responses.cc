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

// Members that chats have by the same name.
constexpr std::array<std::string_view, 21> kCopied = {"model",
                                                      "stream",
                                                      "temperature",
                                                      "top_p",
                                                      "parallel_tool_calls",
                                                      "top_k",
                                                      "min_p",
                                                      "repetition_penalty",
                                                      "presence_penalty",
                                                      "frequency_penalty",
                                                      "seed",
                                                      "stop",
                                                      "logit_bias",
                                                      "stop_token_ids",
                                                      "min_tokens",
                                                      "ignore_eos",
                                                      "skip_special_tokens",
                                                      "chat_template_kwargs",
                                                      "priority",
                                                      "cache_salt",
                                                      "timeout"};
constexpr std::array<std::string_view, 17> kFields = {
    "input",
    "instructions",
    "tools",
    "tool_choice",
    "text",
    "max_output_tokens",
    "reasoning",
    "store",
    "previous_response_id",
    "truncation",
    "include",
    "top_logprobs",
    "background",
    "prompt",
    "conversation",
    "context_management",
    "metadata"};  // kept with the response, and nothing else
constexpr std::array kIgnored = {
    IgnoredRow{"user"},
    IgnoredRow{"service_tier", {"\"auto\"", "\"default\""}},
    IgnoredRow{"safety_identifier"},
    IgnoredRow{"prompt_cache_key"},
    IgnoredRow{"prompt_cache_retention", {"\"in_memory\"", "\"in-memory\""}},
    IgnoredRow{"prompt_cache_options"},
    IgnoredRow{"max_tool_calls"},  // of tools that a server calls: there are none here
    IgnoredRow{"stream_options", {"{}", R"({"include_obfuscation":false})"}},
    IgnoredRow{"client_metadata"},
    IgnoredRow{"moderation"},
    IgnoredRow{"request_id"},
};

/// One conversion. Errors go to fields_.
class ResponsesReader final {
 public:
  ResponsesReader(const Json& body, Strictness strictness)
      : body_(body), strictness_(strictness), fields_(body) {}

  ChatBody read(const JsonArray& earlier);

 private:
  void check_members();
  void check_include();
  void read_input(const JsonArray& earlier);
  void read_item(const Json& item, const std::string& where);
  void read_message(const Json& item, const std::string& where);
  void read_call(const Json& item, const std::string& where);
  void read_output(const Json& item, const std::string& where);
  void read_reasoning(const Json& item, const std::string& where);
  Json tool_of_chat(const Json& tool, const std::string& where);
  void read_tool_choice();
  void read_text();
  void read_limits();
  [[nodiscard]] std::string text_of(const Json& content, const std::string& where);
  void add(std::string_view role, std::string content);
  void flush();

  const Json& body_;
  const Strictness strictness_;
  FieldReader fields_;
  IgnoredFields ignored_;
  Json chat_ = JsonObject();
  JsonArray messages_;
  // What the model said and called in one turn is one message.
  std::string thought_, said_;
  JsonArray calls_;
  bool turn_ = false;  // there is something of it
};

/// The text of a string, or of an array of parts.
std::string ResponsesReader::text_of(const Json& content, const std::string& where) {
  if (content.is_string()) {
    return content.as_string();
  }
  std::string text;
  if (!content.is_array()) {
    fields_.fail(where, where + ": expected a string or an array of parts");
    return text;
  }
  for (const Json& part : content.as_array()) {
    const std::string_view type = member_type(part);
    if (type == "refusal") {
      text += text_member(fields_, part, "refusal", where);
    } else if (type == "input_text" || type == "output_text" || type == "text" ||
               type == "reasoning_text" || type == "summary_text") {
      text += text_member(fields_, part, "text", where);
    } else {
      fields_.fail(where, fmt::format("{}: parts of the type \"{}\" are not supported; send text",
                                      where, shown(type)));
    }
  }
  return text;
}

void ResponsesReader::add(std::string_view role, std::string content) {
  messages_.push_back(Json::object({{"role", role}, {"content", std::move(content)}}));
}

/// Ends the model's turn.
void ResponsesReader::flush() {
  if (!std::exchange(turn_, false)) {
    return;
  }
  Json message = Json::object({{"role", "assistant"}, {"content", std::exchange(said_, {})}});
  if (!thought_.empty()) {
    message.set("reasoning_content", thought_);
    message.set("reasoning", std::exchange(thought_, {}));
  }
  if (!calls_.empty()) {
    message.set("tool_calls", std::exchange(calls_, {}));
  }
  messages_.push_back(std::move(message));
}

void ResponsesReader::read_message(const Json& item, const std::string& where) {
  const std::string role = text_member(fields_, item, "role", where);
  const Json* content = item.find("content");
  constexpr std::array kRoles = {"user", "assistant", "system", "developer"};
  if (std::find(kRoles.begin(), kRoles.end(), role) == kRoles.end()) {
    fields_.fail(where + ".role", where + ".role: expected user, assistant, system or developer");
    return;
  }
  if (content == nullptr) {
    fields_.fail(where + ".content", where + ".content: missing");
    return;
  }
  std::string text = text_of(*content, where + ".content");
  if (role != "assistant") {
    flush();
    add(role == "developer" ? "system" : role, std::move(text));
    return;
  }
  if (!said_.empty() || !calls_.empty()) {
    flush();
  }
  said_ = std::move(text);
  turn_ = true;
}

void ResponsesReader::read_call(const Json& item, const std::string& where) {
  const Json function =
      Json::object({{"name", text_member(fields_, item, "name", where)},
                    {"arguments", text_member(fields_, item, "arguments", where)}});
  calls_.push_back(Json::object({{"id", text_member(fields_, item, "call_id", where)},
                                 {"type", "function"},
                                 {"function", function}}));
  turn_ = true;
}

void ResponsesReader::read_output(const Json& item, const std::string& where) {
  flush();
  const Json* output = item.find("output");
  if (output == nullptr) {
    fields_.fail(where + ".output", where + ".output: missing");
    return;
  }
  messages_.push_back(Json::object({{"role", "tool"},
                                    {"tool_call_id", text_member(fields_, item, "call_id", where)},
                                    {"content", text_of(*output, where + ".output")}}));
}

/// The thoughts themselves where they are there, else their summary. What is encrypted is lost.
void ResponsesReader::read_reasoning(const Json& item, const std::string& where) {
  if (!said_.empty() || !calls_.empty()) {
    flush();
  }
  for (const char* key : {"content", "summary"}) {
    const Json* parts = item.find(key);
    if (parts != nullptr && parts->is_array() && !parts->as_array().empty()) {
      thought_ += text_of(*parts, fmt::format("{}.{}", where, key));
      turn_ = true;
      return;
    }
  }
}

void ResponsesReader::read_item(const Json& item, const std::string& where) {
  const std::string_view type = member_type(item);
  if (!item.is_object()) {
    fields_.fail(where, where + ": expected an object");
  } else if (type == "message" || (type.empty() && item.find("role") != nullptr)) {
    read_message(item, where);
  } else if (type == "function_call") {
    read_call(item, where);
  } else if (type == "function_call_output") {
    read_output(item, where);
  } else if (type == "reasoning") {
    read_reasoning(item, where);
  } else {
    fields_.fail(where, fmt::format("{}: items of the type \"{}\" are not supported; send message, "
                                    "function_call, function_call_output or reasoning",
                                    where, shown(type)));
  }
}

void ResponsesReader::read_input(const JsonArray& earlier) {
  std::string instructions;
  fields_.text("instructions", instructions);
  if (!instructions.empty()) {
    add("system", std::move(instructions));
  }
  const Json* input = fields_.find("input");
  if (input == nullptr || (!input->is_string() && !input->is_array())) {
    fields_.fail("input", "input: expected a string or an array of items");
    return;
  }
  for (const Json& item : earlier) {
    read_item(item, "previous_response_id");
  }
  const JsonArray items = response_items(body_);
  for (size_t i = 0; i < items.size() && !fields_.error(); ++i) {
    read_item(items[i], fmt::format("input[{}]", i));
  }
  flush();
  chat_.set("messages", std::move(messages_));
}

Json ResponsesReader::tool_of_chat(const Json& tool, const std::string& where) {
  if (member_type(tool) != "function") {
    leave_out_tool(fields_, tool, strictness_, ignored_);
    return {};
  }
  Json function = Json::object({{"name", text_member(fields_, tool, "name", where)}});
  for (const char* key : {"description", "parameters", "strict"}) {
    const Json* value = tool.find(key);
    if (value != nullptr && !value->is_null()) {
      function.set(key, *value);
    }
  }
  return function_object(std::move(function));
}

/// What a chat can choose is for the chat to say.
void ResponsesReader::read_tool_choice() {
  const Json* choice = fields_.find("tool_choice");
  if (choice == nullptr) {
    return;
  }
  if (choice->is_string()) {
    chat_.set("tool_choice", *choice);
  } else if (member_type(*choice) == "function") {
    const Json function =
        Json::object({{"name", text_member(fields_, *choice, "name", "tool_choice")}});
    chat_.set("tool_choice", function_object(function));
  } else {
    fields_.fail("tool_choice",
                 "tool_choice: expected auto, none, required or an object "
                 "{\"type\": \"function\", \"name\": ...}");
  }
}

void ResponsesReader::read_text() {
  const Json* text = fields_.find("text");
  const Json* format = text != nullptr ? text->find("format") : nullptr;
  if (text != nullptr && !text->is_object()) {
    fields_.fail("text", "text: expected an object");
  }
  const Json* verbosity = text != nullptr ? text->find("verbosity") : nullptr;
  if (verbosity != nullptr && !verbosity->is_null() && verbosity->dump() != "\"medium\"") {
    ignore_field(fields_, "text.verbosity", strictness_, ignored_);
  }
  if (format == nullptr || format->is_null()) {
    return;
  }
  Json chat = Json::object({{"type", member_type(*format)}});
  if (member_type(*format) == "json_schema") {
    Json schema = JsonObject();
    for (const char* key : {"name", "description", "schema", "strict"}) {
      const Json* value = format->find(key);
      if (value != nullptr && !value->is_null()) {
        schema.set(key, *value);
      }
    }
    chat.set("json_schema", std::move(schema));
  }
  chat_.set("response_format", std::move(chat));
}

void ResponsesReader::read_limits() {
  if (const Json* given = fields_.find("max_output_tokens")) {
    int64_t most = 0;
    fields_.integer("max_output_tokens", 1, std::numeric_limits<int32_t>::max(), most);
    chat_.set("max_completion_tokens", *given);
  }
  const Json* reasoning = fields_.find("reasoning");
  if (reasoning == nullptr) {
    return;
  }
  if (!reasoning->is_object()) {
    fields_.fail("reasoning", "reasoning: expected an object");
    return;
  }
  if (const Json* effort = reasoning->find("effort"); effort != nullptr && !effort->is_null()) {
    chat_.set("reasoning_effort", *effort);
  }
  for (const auto& [key, name] : {std::pair{"summary", "reasoning.summary"},
                                  std::pair{"generate_summary", "reasoning.generate_summary"}}) {
    if (const Json* asked = reasoning->find(key); asked != nullptr && !asked->is_null()) {
      ignore_field(fields_, name, strictness_, ignored_);
    }
  }
}

void ResponsesReader::check_include() {
  const Json* include = fields_.find("include");
  if (include == nullptr) {
    return;
  }
  if (!include->is_array()) {
    fields_.fail("include", "include: expected an array of strings");
    return;
  }
  for (const Json& what : include->as_array()) {
    if (what.is_string() && what.as_string() == "message.output_text.logprobs") {
      fields_.fail("include", "include: log probabilities are given by /v1/chat/completions");
    }
    ignore_field(fields_, "include", strictness_, ignored_);
  }
}

void ResponsesReader::check_members() {
  const auto known = [](std::string_view key) {
    return std::find(kFields.begin(), kFields.end(), key) != kFields.end() ||
           std::find(kCopied.begin(), kCopied.end(), key) != kCopied.end() ||
           std::ranges::find(kIgnored, key, &IgnoredRow::name) != kIgnored.end();
  };
  ignored_.unknown = check_unknown_fields(fields_, body_, known, strictness_);
  read_ignored(fields_, kIgnored, strictness_, ignored_);
  fields_.refuse("background", "read the answer, or a stream of it");
  fields_.refuse("prompt", "there are no stored prompts; send input and instructions");
  fields_.refuse("conversation", "use previous_response_id, or send all items as input");
  fields_.refuse("context_management", "send as many items as the context holds");
  int64_t top_logprobs = 0;
  fields_.integer("top_logprobs", 0, 0, top_logprobs);
  std::string truncation = "disabled";
  fields_.text("truncation", truncation);
  if (truncation != "disabled") {
    fields_.fail("truncation", "truncation: only \"disabled\" is supported; send fewer items");
  }
  check_include();
}

ChatBody ResponsesReader::read(const JsonArray& earlier) {
  check_members();
  read_input(earlier);
  set_tools(
      fields_,
      [this](const Json& tool, const std::string& where) { return tool_of_chat(tool, where); },
      chat_);
  read_tool_choice();
  read_text();
  read_limits();
  for (const std::string_view key : kCopied) {
    if (const Json* value = fields_.find(key)) {
      chat_.set(std::string(key), *value);
    }
  }
  if (fields_.error()) {
    return *fields_.error();
  }
  return TranslatedBody{std::move(chat_), std::move(ignored_)};
}

}  // namespace

JsonArray response_items(const Json& body) {
  const Json* input = body.find("input");
  if (input != nullptr && input->is_array()) {
    return input->as_array();
  }
  const Json text = input != nullptr && input->is_string() ? *input : Json("");
  return {Json::object({{"type", "message"}, {"role", "user"}, {"content", text}})};
}

ChatBody chat_of_responses(const Json& body, const JsonArray& earlier, Strictness strictness) {
  return ResponsesReader(body, strictness).read(earlier);
}

}  // namespace nibble
