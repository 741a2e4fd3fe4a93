#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "server/app.h"

namespace nibble {

/// Token ids, or why there are none.
using PromptTokens = std::variant<std::vector<int32_t>, ApiError>;

/// Renders the model's chat template and tokenizes the text.
[[nodiscard]] PromptTokens chat_prompt(const AppContext& context, const GenerationRequest& request);
struct PromptText {
  bool add_special = true;       // the tokens that the tokenizer puts before a prompt come, too
  const char* field = "prompt";  // that errors name
};
/// Tokenizes a text.
[[nodiscard]] PromptTokens text_prompt(const AppContext& context,
                                       std::string_view text,
                                       const PromptText& options);
/// The tokens of each prompt, of which some may be token ids.
[[nodiscard]] std::variant<std::vector<std::vector<int32_t>>, ApiError> prompt_tokens(
    const AppContext& context, const std::vector<PromptInput>& prompts, const PromptText& options);

/// Refuses more answers than could ever wait, and token ids that the model lacks.
[[nodiscard]] std::optional<ApiError> check_request(const AppContext& context,
                                                    const GenerationRequest& request,
                                                    size_t num_prompts);

/// Drops tokens in front of the last `kept`; with -1, of those that leave room for `answer` more.
void truncate_prompt(const AppContext& context,
                     std::optional<int64_t> kept,
                     int64_t answer,
                     std::vector<int32_t>& prompt);

/// The tokens of request.bad_words, of each with and without a blank in front; those that the model
/// lacks are left out.
[[nodiscard]] std::variant<std::vector<std::vector<int32_t>>, ApiError> bad_word_tokens(
    const AppContext& context, const GenerationRequest& request);

/// Refuses a prompt that does not fit the context with `answer` tokens more, has no tokens, or some
/// that the model lacks. Errors name `field`.
[[nodiscard]] std::optional<ApiError> check_prompt(const AppContext& context,
                                                   const std::vector<int32_t>& prompt,
                                                   int64_t answer,
                                                   const char* field);
/// The field that a request's prompt comes from.
[[nodiscard]] const char* prompt_field(const GenerationRequest& request);

}  // namespace nibble
