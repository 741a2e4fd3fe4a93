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

/// Refuses a prompt that does not fit the context with its answer, or has tokens that the model
/// lacks.
[[nodiscard]] std::optional<ApiError> check_prompt(const AppContext& context,
                                                   const std::vector<int32_t>& prompt,
                                                   const GenerationRequest& request);

}  // namespace nibble
