#pragma once

#include <string_view>
#include <variant>

#include "base/json.h"
#include "server/error.h"
#include "server/schema.h"

namespace nibble {

/// The body of a chat in OpenAI's form that asks for what the body of another route asks for, or
/// why there is none.
using ChatBody = std::variant<Json, ApiError>;

/// Of /v1/messages. Blocks other than text, tool_use, tool_result and thinking are refused.
[[nodiscard]] ChatBody chat_of_messages(const Json& body, Strictness strictness);

/// What of a system prompt a model is given: all but a first line "x-anthropic-billing-header:
/// ...", which a client changes with every request, so that no two prompts would begin alike.
[[nodiscard]] std::string_view without_billing_line(std::string_view system);

}  // namespace nibble
