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
/// Tokenizes a text, after the tokens that the tokenizer puts before a prompt if `add_special`.
[[nodiscard]] PromptTokens text_prompt(const AppContext& context,
                                       std::string_view text,
                                       bool add_special);

/// Refuses more answers than could ever wait, and token ids that the model lacks.
[[nodiscard]] std::optional<ApiError> check_request(const AppContext& context,
                                                    const GenerationRequest& request,
                                                    size_t num_prompts);

/// Drops tokens in front, as request.truncate_prompt_tokens says.
void truncate_prompt(const AppContext& context,
                     const GenerationRequest& request,
                     std::vector<int32_t>& prompt);

/// The tokens of request.bad_words, of each with and without a blank in front; those that the model
/// lacks are left out.
[[nodiscard]] std::variant<std::vector<std::vector<int32_t>>, ApiError> bad_word_tokens(
    const AppContext& context, const GenerationRequest& request);

/// Refuses a prompt that does not fit the context with its answer, or has tokens that the model
/// lacks.
[[nodiscard]] std::optional<ApiError> check_prompt(const AppContext& context,
                                                   const std::vector<int32_t>& prompt,
                                                   const GenerationRequest& request);

}  // namespace nibble
