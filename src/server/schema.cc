#include "server/schema.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "base/log.h"

namespace nibble {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxChoices = 128;
constexpr size_t kMaxStopStrings = 16;
constexpr int64_t kMaxLogprobs = 20;

// Fields of both routes that are read, or that are harmless and therefore accepted unread.
constexpr std::array kCommonFields = {
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "seed", "stop",
    "stream", "stream_options", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs",
    "user", "service_tier", "metadata", "store", "top_k", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "add_special_tokens", "priority", "request_id", "session_id",
    "cache_salt", "spaces_between_special_tokens", "response_format", "best_of",
    // refused when set, see refuse_unsupported()
    "bad_words", "allowed_token_ids", "prompt_logprobs", "structured_outputs", "regex", "ebnf",
    "json_schema", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "truncate_prompt_tokens", "return_token_ids", "no_stop_trim", "thinking_token_budget"};
constexpr std::array kChatFields = {"messages",
                                    "top_logprobs",
                                    "tools",
                                    "tool_choice",
                                    "parallel_tool_calls",
                                    "reasoning_effort",
                                    "chat_template",
                                    "chat_template_kwargs",
                                    "add_generation_prompt",
                                    "continue_final_message",
                                    "include_reasoning",
                                    "separate_reasoning",
                                    "modalities",
                                    "prediction",
                                    "verbosity"};
constexpr std::array kCompletionFields = {"prompt", "echo", "suffix"};

template <typename Fields>
bool listed(const Fields& fields, std::string_view key) {
  return std::find(fields.begin(), fields.end(), key) != fields.end();
}

bool truthy(const Json& value) {
  switch (value.type()) {
    case Json::Type::kNull:
      return false;
    case Json::Type::kBool:
      return value.as_bool();
    case Json::Type::kArray:
      return !value.as_array().empty();
    default:
      return true;
  }
}

void check_unknown(const Json& body, bool chat, Strictness strictness, FieldReader& fields) {
  for (const auto& [key, value] : body.as_object()) {
    const bool known = listed(kCommonFields, key) ||
                       (chat ? listed(kChatFields, key) : listed(kCompletionFields, key));
    if (known) {
      continue;
    }
    if (strictness == Strictness::kStrict) {
      fields.fail(key, fmt::format("unknown field \"{}\"; remove it, or start the server without "
                                   "--strict to have such fields ignored",
                                   key));
      return;
    }
    NIBBLE_LOG(kWarning, "request field \"{}\" is unknown and ignored", key);
  }
}

void refuse_unsupported(FieldReader& fields) {
  for (const char* key : {"structured_outputs", "regex", "ebnf", "json_schema", "guided_json",
                          "guided_regex", "guided_choice", "guided_grammar"}) {
    fields.refuse(key, "this server does not constrain the form of an answer");
  }
  fields.refuse("bad_words", "use logit_bias to forbid tokens");
  fields.refuse("allowed_token_ids", "use logit_bias to forbid tokens");
  fields.refuse("prompt_logprobs", "log probabilities are given for generated tokens only");
  fields.refuse("truncate_prompt_tokens", "shorten the prompt before sending it");
  fields.refuse("return_token_ids", "use /tokenize for the ids of a text");
  fields.refuse("thinking_token_budget", "use max_tokens to bound the answer");
  if (const Json* format = fields.find("response_format")) {
    const Json* type = format->find("type");
    if (type == nullptr || !type->is_string()) {
      fields.fail("response_format", "response_format: expected an object with a string \"type\"");
    } else if (type->as_string() != "text") {
      fields.fail("response_format",
                  fmt::format("response_format type \"{}\" is not supported: this server does not "
                              "constrain the form of an answer; use {{\"type\": \"text\"}}",
                              type->as_string()));
    }
  }
  int64_t best_of = 1;
  fields.integer("best_of", 1, 1, best_of);
}

void read_stop(FieldReader& fields, GenerationRequest& request) {
  const Json* stop = fields.find("stop");
  if (stop == nullptr) {
    return;
  }
  if (stop->is_string()) {
    request.stop.push_back(stop->as_string());
  } else if (stop->is_array() && std::all_of(stop->as_array().begin(), stop->as_array().end(),
                                             [](const Json& s) { return s.is_string(); })) {
    for (const Json& text : stop->as_array()) {
      request.stop.push_back(text.as_string());
    }
  } else {
    fields.fail("stop", "stop: expected a string or an array of strings");
    return;
  }
  std::erase(request.stop, "");
  if (request.stop.size() > kMaxStopStrings) {
    fields.fail("stop", fmt::format("stop: at most {} strings, got {}", kMaxStopStrings,
                                    request.stop.size()));
  }
}

void read_logit_bias(FieldReader& fields, SamplingParams& sampling) {
  const Json* bias = fields.find("logit_bias");
  if (bias == nullptr) {
    return;
  }
  if (!bias->is_object()) {
    fields.fail("logit_bias", "logit_bias: expected an object from token id to number");
    return;
  }
  for (const auto& [key, value] : bias->as_object()) {
    int32_t token = -1;
    const auto parsed = std::from_chars(key.data(), key.data() + key.size(), token);
    if (parsed.ec != std::errc() || parsed.ptr != key.data() + key.size() || token < 0) {
      fields.fail("logit_bias", fmt::format("logit_bias: \"{}\" is not a token id", key));
      return;
    }
    if (!value.is_number() || value.as_double() < -100 || value.as_double() > 100) {
      fields.fail("logit_bias",
                  fmt::format("logit_bias[{}]: expected a number from -100 to 100", key));
      return;
    }
    sampling.logit_bias.emplace_back(token, static_cast<float>(value.as_double()));
  }
}

void read_sampling(FieldReader& fields, SamplingParams& sampling) {
  fields.number("temperature", 0, 100, sampling.temperature);
  fields.number("top_p", 0, 1, sampling.top_p);
  if (sampling.top_p <= 0) {
    fields.fail("top_p", "top_p: must be above 0");
  }
  fields.integer("top_k", -1, kMaxTokens, sampling.top_k);
  sampling.top_k = std::max<int64_t>(sampling.top_k, 0);
  fields.number("min_p", 0, 1, sampling.min_p);
  fields.number("repetition_penalty", 0, 100, sampling.repetition_penalty);
  if (sampling.repetition_penalty <= 0) {
    fields.fail("repetition_penalty", "repetition_penalty: must be above 0");
  }
  fields.number("presence_penalty", -2, 2, sampling.presence_penalty);
  fields.number("frequency_penalty", -2, 2, sampling.frequency_penalty);
  if (fields.find("seed") != nullptr) {
    int64_t seed = 0;
    fields.integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                   seed);
    sampling.seed = static_cast<uint64_t>(seed);
  }
  read_logit_bias(fields, sampling);
}

void read_stream(FieldReader& fields, GenerationRequest& request) {
  fields.boolean("stream", request.stream);
  const Json* options = fields.find("stream_options");
  if (options == nullptr) {
    return;
  }
  if (!options->is_object()) {
    fields.fail("stream_options", fmt::format("stream_options: expected an object, got {}",
                                              json_type_name(*options)));
    return;
  }
  if (!request.stream) {
    fields.fail("stream_options", "stream_options: only allowed when stream is true");
    return;
  }
  FieldReader inner(*options);
  inner.boolean("include_usage", request.include_usage);
  inner.boolean("continuous_usage_stats", request.continuous_usage);
  if (inner.error()) {
    fields.fail("stream_options." + inner.error()->param, inner.error()->message);
  }
}

void read_common(FieldReader& fields, const SchemaOptions& options, GenerationRequest& request) {
  request.sampling = options.defaults;
  fields.text("model", request.model);
  for (const char* key : {"max_tokens", "max_completion_tokens"}) {  // the second wins
    int64_t value = 0;
    if (fields.find(key) != nullptr) {
      fields.integer(key, 1, kMaxTokens, value);
      request.max_tokens = value;
    }
  }
  fields.integer("min_tokens", 0, kMaxTokens, request.min_tokens);
  if (request.max_tokens && request.min_tokens > *request.max_tokens) {
    fields.fail("min_tokens", "min_tokens: must not be above max_tokens");
  }
  fields.integer("n", 1, kMaxChoices, request.n);
  read_stream(fields, request);
  read_stop(fields, request);
  fields.boolean("include_stop_str_in_output", request.include_stop);
  fields.boolean("skip_special_tokens", request.skip_special_tokens);
  fields.boolean("ignore_eos", request.ignore_eos);
  fields.token_ids("stop_token_ids", request.stop_token_ids);
  read_sampling(fields, request.sampling);
  refuse_unsupported(fields);
}

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
  } else if (!listed(kRoles, role->as_string())) {
    fields.fail(where + ".role",
                fmt::format("{}.role: \"{}\" is not one of system, developer, user, assistant, "
                            "tool",
                            where, role->as_string()));
  }
  const Json* content = message.find("content");
  if (content == nullptr || content->is_null()) {
    if (message.find("tool_calls") == nullptr) {
      fields.fail(where + ".content", where + ".content: missing");
    }
  } else if (!content->is_string() && !content->is_array()) {
    fields.fail(where + ".content",
                fmt::format("{}.content: expected a string or an array of parts, got {}", where,
                            json_type_name(*content)));
  }
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
        fields.fail(fmt::format("messages[{}].content", index),
                    fmt::format("messages[{}].content: only parts {{\"type\": \"text\", \"text\": "
                                "\"...\"}} are supported",
                                index));
        return;
      }
      text += value->as_string();
    }
  }
  message.set("content", text);
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
    check_message(fields, list[i], i);
    if (!fields.error()) {
      flatten_content(fields, list[i], i);
    }
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
    }
  }
  const Json* choice = fields.find("tool_choice");
  if (choice == nullptr) {
    return;
  }
  if (choice->is_string() && choice->as_string() == "none") {
    request.tools = Json();
  } else if (!choice->is_string() || choice->as_string() != "auto") {
    fields.fail("tool_choice",
                "tool_choice: only \"auto\" and \"none\" are supported: this server does not "
                "constrain the form of an answer");
  }
}

void read_chat(FieldReader& fields, GenerationRequest& request) {
  read_messages(fields, request);
  read_tools(fields, request);
  if (const Json* arguments = fields.find("chat_template_kwargs")) {
    if (!arguments->is_object()) {
      fields.fail("chat_template_kwargs", "chat_template_kwargs: expected an object");
    }
    request.template_arguments = *arguments;
  }
  fields.boolean("add_generation_prompt", request.add_generation_prompt);
  fields.refuse("chat_template", "give the template to the server with --chat-template");
  fields.refuse("continue_final_message", "use /v1/completions to continue a text");
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

bool is_id_array(const Json& value) {
  return value.is_array() && !value.as_array().empty() && value.as_array().front().is_number();
}

void read_prompt(FieldReader& fields, GenerationRequest& request) {
  const Json* prompt = fields.find("prompt");
  constexpr const char* kExpected =
      "prompt: expected a string, an array of strings, an array of token ids, or an array of such "
      "arrays, not empty";
  const auto read_one = [&](const Json& value) {
    if (value.is_string()) {
      request.prompts.emplace_back(value.as_string());
      return;
    }
    std::vector<int32_t> ids;
    const Json holder = Json::object({{"prompt", value}});
    FieldReader inner(holder);
    inner.token_ids("prompt", ids);
    if (inner.error() || ids.empty()) {
      fields.fail("prompt", inner.error() ? inner.error()->message : kExpected);
    } else {
      request.prompts.emplace_back(std::move(ids));
    }
  };
  if (prompt == nullptr) {
    fields.fail("prompt", kExpected);
  } else if (prompt->is_string() || is_id_array(*prompt)) {
    read_one(*prompt);
  } else if (prompt->is_array() && !prompt->as_array().empty()) {
    for (const Json& value : prompt->as_array()) {
      read_one(value);
    }
  } else {
    fields.fail("prompt", kExpected);
  }
}

void read_completion(FieldReader& fields, GenerationRequest& request) {
  read_prompt(fields, request);
  fields.boolean("echo", request.echo);
  fields.boolean("add_special_tokens", request.add_special_tokens);
  fields.refuse("suffix", "text is only continued at its end");
  if (fields.find("logprobs") != nullptr) {
    int64_t count = 0;
    fields.integer("logprobs", 0, kMaxLogprobs, count);
    request.logprobs = static_cast<int>(count);
    if (request.echo) {
      fields.fail("logprobs", "logprobs: not available together with echo");
    }
  }
}

enum class Route { kChat, kCompletion };

ParsedRequest parse(std::string_view body, Route route, const SchemaOptions& options) {
  const Result<Json> json = Json::parse(body);
  if (!json.ok()) {
    return ApiError{400, "the request body is not valid JSON: " + json.status().message(), "", ""};
  }
  if (!json->is_object()) {
    return ApiError{
        400, fmt::format("the request body must be a JSON object, not {}", json_type_name(*json)),
        "", ""};
  }
  FieldReader fields(*json);
  GenerationRequest request;
  check_unknown(*json, route == Route::kChat, options.strictness, fields);
  read_common(fields, options, request);
  if (route == Route::kChat) {
    read_chat(fields, request);
  } else {
    read_completion(fields, request);
  }
  if (fields.error()) {
    return *fields.error();
  }
  return request;
}

}  // namespace

ParsedRequest parse_chat_request(std::string_view body, const SchemaOptions& options) {
  return parse(body, Route::kChat, options);
}

ParsedRequest parse_completion_request(std::string_view body, const SchemaOptions& options) {
  return parse(body, Route::kCompletion, options);
}

std::string_view json_type_name(const Json& value) {
  switch (value.type()) {
    case Json::Type::kNull:
      return "null";
    case Json::Type::kBool:
      return "a boolean";
    case Json::Type::kInt:
    case Json::Type::kUint:
      return "an integer";
    case Json::Type::kDouble:
      return "a number";
    case Json::Type::kString:
      return "a string";
    case Json::Type::kArray:
      return "an array";
    case Json::Type::kObject:
      return "an object";
  }
  return "a value";
}

const Json* FieldReader::find(std::string_view key) const {
  const Json* value = object_.find(key);
  return value == nullptr || value->is_null() ? nullptr : value;
}

void FieldReader::fail(std::string_view key, std::string message) {
  if (!error_) {
    error_ = ApiError{400, std::move(message), std::string(key), ""};
  }
}

void FieldReader::wrong_type(std::string_view key, std::string_view expected, const Json& got) {
  fail(key, fmt::format("{}: expected {}, got {}", key, expected, json_type_name(got)));
}

void FieldReader::refuse(std::string_view key, std::string_view reason) {
  const Json* value = find(key);
  if (value != nullptr && truthy(*value)) {
    fail(key, fmt::format("{} is not supported: {}", key, reason));
  }
}

void FieldReader::text(std::string_view key, std::string& target) {
  if (const Json* value = find(key)) {
    value->is_string() ? void(target = value->as_string()) : wrong_type(key, "a string", *value);
  }
}

void FieldReader::boolean(std::string_view key, bool& target) {
  if (const Json* value = find(key)) {
    value->is_bool() ? void(target = value->as_bool()) : wrong_type(key, "a boolean", *value);
  }
}

void FieldReader::integer(std::string_view key, int64_t low, int64_t high, int64_t& target) {
  const Json* value = find(key);
  if (value == nullptr) {
    return;
  }
  if (!value->is_int()) {
    wrong_type(key, "an integer", *value);
  } else if (value->as_int() < low || value->as_int() > high) {
    fail(key, low == high ? fmt::format("{}: must be {}, got {}", key, low, value->as_int())
                          : fmt::format("{}: must be from {} to {}, got {}", key, low, high,
                                        value->as_int()));
  } else {
    target = value->as_int();
  }
}

void FieldReader::number(std::string_view key, double low, double high, double& target) {
  const Json* value = find(key);
  if (value == nullptr) {
    return;
  }
  if (!value->is_number()) {
    wrong_type(key, "a number", *value);
  } else if (value->as_double() < low || value->as_double() > high) {
    fail(key, fmt::format("{}: must be from {} to {}, got {}", key, low, high, value->as_double()));
  } else {
    target = value->as_double();
  }
}

void FieldReader::token_ids(std::string_view key, std::vector<int32_t>& target) {
  const Json* value = find(key);
  if (value == nullptr) {
    return;
  }
  if (!value->is_array()) {
    wrong_type(key, "an array of token ids", *value);
    return;
  }
  for (const Json& id : value->as_array()) {
    if (!id.is_int() || id.as_int() < 0 || id.as_int() > std::numeric_limits<int32_t>::max()) {
      fail(key, fmt::format("{}: {} is not a token id", key, id.dump()));
      return;
    }
    target.push_back(static_cast<int32_t>(id.as_int()));
  }
}

}  // namespace nibble
