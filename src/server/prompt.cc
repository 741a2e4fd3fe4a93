#include "server/prompt.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "server/continued_message.h"

namespace nibble {
namespace {

// Normalization may make a text shorter; no published normalizer comes near this.
constexpr size_t kNormalizedSlack = 4;
constexpr const char* kTooLong = "context_length_exceeded";

/// Refuses what cannot fit however well it tokenizes, without the work of tokenizing it.
std::optional<ApiError> check_size(const AppContext& context,
                                   std::string_view text,
                                   const char* param) {
  const int64_t limit = context.engine.options().max_model_len;
  const size_t longest = context.text.longest_token();
  if (text.size() <= static_cast<size_t>(limit) * longest * kNormalizedSlack) {
    return std::nullopt;
  }
  return ApiError{400,
                  fmt::format("This model's maximum context length is {} tokens of at most {} "
                              "bytes each, but the prompt has {} bytes; shorten the prompt",
                              limit, longest, text.size()),
                  param, kTooLong};
}

}  // namespace

PromptTokens chat_prompt(const AppContext& context, const GenerationRequest& request) {
  const auto given = [](const Json& value) { return value.is_null() ? nullptr : &value; };
  const ChatInput input{.messages = &request.messages,
                        .tools = given(request.tools),
                        .template_arguments = given(request.template_arguments),
                        .add_generation_prompt = request.add_generation_prompt};
  const Result<std::string> text = request.continue_final_message
                                       ? render_continued(context.text, input)
                                       : context.text.render_chat(input);
  if (!text.ok()) {
    ApiError error = to_api_error(text.status());
    error.param = "messages";
    return error;
  }
  return text_prompt(context, *text, {.add_special = false, .field = "messages"});
}

PromptTokens text_prompt(const AppContext& context,
                         std::string_view text,
                         const PromptText& options) {
  if (auto error = check_size(context, text, options.field)) {
    return *std::move(error);
  }
  Result<std::vector<int32_t>> tokens = context.text.encode(text, options.add_special);
  if (!tokens.ok()) {
    ApiError error = to_api_error(tokens.status());
    error.param = options.field;
    return error;
  }
  return std::move(tokens).value();
}

std::variant<std::vector<std::vector<int32_t>>, ApiError> prompt_tokens(
    const AppContext& context, const std::vector<PromptInput>& prompts, const PromptText& options) {
  std::vector<std::vector<int32_t>> out;
  for (const PromptInput& prompt : prompts) {
    if (const auto* ids = std::get_if<std::vector<int32_t>>(&prompt)) {
      out.push_back(*ids);
      continue;
    }
    PromptTokens tokens = text_prompt(context, std::get<std::string>(prompt), options);
    if (auto* error = std::get_if<ApiError>(&tokens)) {
      return std::move(*error);
    }
    out.push_back(std::move(std::get<std::vector<int32_t>>(tokens)));
  }
  return out;
}

const char* prompt_field(const GenerationRequest& request) {
  return request.messages.is_array() ? "messages" : "prompt";
}

std::optional<ApiError> check_request(const AppContext& context,
                                      const GenerationRequest& request,
                                      size_t num_prompts) {
  const int64_t most = context.engine.options().max_queued_requests;
  if (static_cast<int64_t>(num_prompts) > most / request.n) {
    return ApiError{400,
                    fmt::format("{} prompts with n = {}: at most {} answers can be asked for at "
                                "once (--max-queued-requests)",
                                num_prompts, request.n, most),
                    num_prompts > 1 ? "prompt" : "n", ""};
  }
  const int64_t vocabulary = context.engine.model_config().vocab_size;
  const auto unknown = [&](const char* field, int64_t token) {
    return ApiError{400,
                    fmt::format("{}: token id {} is not below the vocabulary's size {}", field,
                                token, vocabulary),
                    field, ""};
  };
  for (const auto& [token, bias] : request.sampling.logit_bias) {
    if (token >= vocabulary) {
      return unknown("logit_bias", token);
    }
  }
  for (const int32_t token : request.sampling.allowed_tokens) {
    if (token >= vocabulary) {
      return unknown("allowed_token_ids", token);
    }
  }
  for (const int32_t token : request.stop_token_ids) {
    if (token >= vocabulary) {
      return unknown("stop_token_ids", token);
    }
  }
  return std::nullopt;
}

void truncate_prompt(const AppContext& context,
                     std::optional<int64_t> kept,
                     int64_t answer,
                     std::vector<int32_t>& prompt) {
  if (!kept) {
    return;
  }
  const int64_t room = std::max<int64_t>(context.engine.options().max_model_len - answer, 1);
  const int64_t most = *kept < 0 ? room : *kept;
  if (most < std::ssize(prompt)) {
    prompt.erase(prompt.begin(), prompt.end() - most);
  }
}

std::variant<std::vector<std::vector<int32_t>>, ApiError> bad_word_tokens(
    const AppContext& context, const GenerationRequest& request) {
  const int64_t vocabulary = context.engine.model_config().vocab_size;
  std::vector<std::vector<int32_t>> out;
  for (const std::string& word : request.bad_words) {
    const std::string bare = word.substr(word.find_first_not_of(' '));
    for (const std::string& text : {bare, " " + bare}) {
      Result<std::vector<int32_t>> tokens = context.text.encode(text, false);
      if (!tokens.ok()) {
        ApiError error = to_api_error(tokens.status());
        error.param = "bad_words";
        return error;
      }
      const bool possible = !tokens->empty() && std::ranges::max(*tokens) < vocabulary;
      if (possible && std::ranges::find(out, *tokens) == out.end()) {
        out.push_back(*std::move(tokens));
      }
    }
  }
  return out;
}

std::optional<ApiError> check_prompt(const AppContext& context,
                                     const std::vector<int32_t>& prompt,
                                     int64_t answer,
                                     const char* field) {
  const int64_t limit = context.engine.options().max_model_len;
  const auto size = static_cast<int64_t>(prompt.size());
  if (size + answer > limit) {
    return ApiError{
        400,
        fmt::format("This model's maximum context length is {} tokens, but the request "
                    "needs {} ({} in the prompt, {} for the answer); shorten the "
                    "prompt{}",
                    limit, size + answer, size, answer, answer > 0 ? " or lower max_tokens" : ""),
        size >= limit || answer == 0 ? field : "max_tokens", kTooLong};
  }
  if (prompt.empty()) {
    return ApiError{400, fmt::format("{}: the prompt has no tokens", field), field, ""};
  }
  const int64_t vocabulary = context.engine.model_config().vocab_size;
  for (const int32_t token : prompt) {
    if (token < 0 || token >= vocabulary) {
      return ApiError{400,
                      fmt::format("{}: token id {} is not below the vocabulary's size {}", field,
                                  token, vocabulary),
                      field, ""};
    }
  }
  return std::nullopt;
}

}  // namespace nibble
