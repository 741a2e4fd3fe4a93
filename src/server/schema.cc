#include "server/schema.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include "base/log.h"
#include "server/schema_routes.h"

namespace nibble {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxChoices = 128;
constexpr size_t kMaxStopStrings = 16;

// Fields of both routes that are read, or are known to be ignored (ignored_fields.h).
constexpr std::array kCommonFields = {"model",
                                      "max_tokens",
                                      "max_completion_tokens",
                                      "temperature",
                                      "top_p",
                                      "n",
                                      "seed",
                                      "stop",
                                      "stream",
                                      "stream_options",
                                      "frequency_penalty",
                                      "presence_penalty",
                                      "logit_bias",
                                      "logprobs",
                                      "user",
                                      "service_tier",
                                      "metadata",
                                      "store",
                                      "top_k",
                                      "min_p",
                                      "repetition_penalty",
                                      "min_tokens",
                                      "ignore_eos",
                                      "stop_token_ids",
                                      "include_stop_str_in_output",
                                      "skip_special_tokens",
                                      "add_special_tokens",
                                      "priority",
                                      "timeout",
                                      "request_id",
                                      "session_id",
                                      "cache_salt",
                                      "spaces_between_special_tokens",
                                      "response_format",
                                      "best_of",
                                      "prompt_logprobs",
                                      "bad_words",
                                      "allowed_token_ids",
                                      "truncate_prompt_tokens",
                                      "return_token_ids",
                                      "no_stop_trim",
                                      "safety_identifier",
                                      "prompt_cache_key",
                                      "prediction",
                                      "verbosity",
                                      "structured_outputs",
                                      "regex",
                                      "ebnf",
                                      "json_schema",
                                      "guided_json",
                                      "guided_regex",
                                      "guided_choice",
                                      "guided_grammar",
                                      "thinking_token_budget"};
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
                                    "modalities"};
constexpr std::array kCompletionFields = {"prompt", "echo", "suffix"};

template <typename Fields>
bool listed(const Fields& fields, std::string_view key) {
  return std::find(fields.begin(), fields.end(), key) != fields.end();
}

void refuse_unsupported(FieldReader& fields) {
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
  } else if (!fields.texts("stop", request.stop)) {
    fields.fail("stop", "stop: expected a string or an array of strings");
    return;
  }
  if (std::find(request.stop.begin(), request.stop.end(), "") != request.stop.end()) {
    fields.fail("stop", "stop: an empty string would end every answer at once; leave it out");
  }
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
      fields.fail("logit_bias", fmt::format("logit_bias: \"{}\" is not a token id", shown(key)));
      return;
    }
    if (!value.is_number() || value.as_double() < -100 || value.as_double() > 100) {
      fields.fail("logit_bias",
                  fmt::format("logit_bias[{}]: expected a number from -100 to 100", shown(key)));
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
      fields.integer(key, 0, kMaxTokens, value);
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
  read_engine_fields(fields, request);
  read_sampling(fields, request.sampling);
  request.form = read_asked_form(fields);
  refuse_unsupported(fields);
}

enum class Route { kChat, kCompletion };

ParsedRequest read(const Json& body, Route route, const SchemaOptions& options) {
  FieldReader fields(body);
  GenerationRequest request;
  const bool chat = route == Route::kChat;
  const auto known = [chat](std::string_view key) {
    return listed(kCommonFields, key) ||
           (chat ? listed(kChatFields, key) : listed(kCompletionFields, key));
  };
  request.ignored.unknown = check_unknown_fields(fields, body, known, options.strictness);
  read_ignored(fields, ignored_by_generation(), options.strictness, request.ignored);
  read_common(fields, options, request);
  if (chat) {
    read_chat_fields(fields, options, request);
  } else {
    read_completion_fields(fields, request);
  }
  if (fields.error()) {
    return *fields.error();
  }
  return request;
}

ParsedRequest parse(std::string_view text, Route route, const SchemaOptions& options) {
  const auto body = parse_object(text);
  if (const auto* error = std::get_if<ApiError>(&body)) {
    return *error;
  }
  return read(std::get<Json>(body), route, options);
}

}  // namespace

int64_t check_unknown_fields(FieldReader& fields,
                             const Json& body,
                             const std::function<bool(std::string_view)>& known,
                             Strictness strictness) {
  std::string first;
  int64_t count = 0;
  for (const auto& [key, value] : body.as_object()) {
    if (!known(key)) {
      first = ++count == 1 ? shown(key) : first;
    }
  }
  if (count == 0) {
    return count;
  }
  if (strictness == Strictness::kStrict) {
    fields.fail(first, fmt::format("unknown field \"{}\"; remove it, or start the server without "
                                   "--strict to have such fields ignored",
                                   first));
    return count;
  }
  NIBBLE_LOG(kWarning, "ignored {} unknown request fields, the first is {}", count,
             Json(first).dump());  // as JSON: it may hold anything
  return count;
}

std::variant<Json, ApiError> parse_object(std::string_view body) {
  Result<Json> json = Json::parse(body);
  if (!json.ok()) {
    return ApiError{400, "the request body is not valid JSON: " + json.status().message(), "", ""};
  }
  if (!json->is_object()) {
    return ApiError{
        400, fmt::format("the request body must be a JSON object, not {}", json_type_name(*json)),
        "", ""};
  }
  return std::move(*json);
}

ParsedRequest parse_chat_request(std::string_view body, const SchemaOptions& options) {
  return parse(body, Route::kChat, options);
}

ParsedRequest parse_completion_request(std::string_view body, const SchemaOptions& options) {
  return parse(body, Route::kCompletion, options);
}

ParsedRequest read_chat_request(const Json& body, const SchemaOptions& options) {
  return read(body, Route::kChat, options);
}

ParsedRequest read_completion_request(const Json& body, const SchemaOptions& options) {
  return read(body, Route::kCompletion, options);
}

}  // namespace nibble
