#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/json.h"
#include "engine/request.h"
#include "server/asked_form.h"
#include "server/error.h"
#include "server/ignored_fields.h"

namespace nibble {

using PromptInput = std::variant<std::string, std::vector<int32_t>>;

/// A checked body of /v1/chat/completions or /v1/completions.
struct GenerationRequest {
  std::string model;
  // Chat only.
  Json messages;
  Json tools;                          // null or an array
  Json template_arguments;             // null or an object
  std::vector<std::string> functions;  // that may be called; empty: none
  bool add_generation_prompt = true;
  bool parallel_tool_calls = true;  // false: calls after the first are left out
  bool separate_reasoning = true;   // false: thoughts stay in the content, with their marks
  bool include_reasoning = true;    // false: they are left out
  // Completions only.
  bool echo = false;
  std::vector<PromptInput> prompts;
  // Both.
  std::optional<int64_t> max_tokens;
  int64_t min_tokens = 0;
  int64_t n = 1;
  bool add_special_tokens = true;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  bool include_stop = false;
  bool skip_special_tokens = true;
  bool ignore_eos = false;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  AskedForm form;
  AskedCalls calls;          // chat only
  int logprobs = -1;         // -1: none; else the number of alternatives
  int prompt_logprobs = -1;  // the same, of the prompt, in a field of its own
  SamplingParams sampling;
  std::vector<std::string> bad_words;
  bool return_token_ids = false;
  std::optional<int64_t> truncate_prompt_tokens;  // the last so many are kept; -1: all that fit
  bool continue_final_message = false;            // chat only
  std::optional<int64_t> thought_tokens;          // most that a thought may have
  std::string cache_salt;
  int64_t priority = 0;
  std::optional<double> timeout_s;
  IgnoredFields ignored;
};

/// Values for sampling fields that a request leaves out.
struct SchemaOptions {
  Strictness strictness = Strictness::kLenient;
  SamplingParams defaults;
  Json template_arguments;  // null or an object; those of a request come before them
};

using ParsedRequest = std::variant<GenerationRequest, ApiError>;

/// The object that a request's body is, or why it is none.
std::variant<Json, ApiError> parse_object(std::string_view body);
/// Parses and checks a request body. The error names the field in `param`.
ParsedRequest parse_chat_request(std::string_view body, const SchemaOptions& options);
ParsedRequest parse_completion_request(std::string_view body, const SchemaOptions& options);
/// Checks an object.
ParsedRequest read_chat_request(const Json& body, const SchemaOptions& options);
ParsedRequest read_completion_request(const Json& body, const SchemaOptions& options);

}  // namespace nibble
