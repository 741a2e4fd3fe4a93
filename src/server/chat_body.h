#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/json.h"
#include "server/error.h"
#include "server/field_reader.h"
#include "server/ignored_fields.h"
#include "server/schema.h"

namespace nibble {

/// A body of OpenAI's form that asks for what the body of another route asks for, and what that one
/// has beside.
struct TranslatedBody {
  Json body;
  IgnoredFields ignored;
};
/// That of a chat, or why there is none.
using ChatBody = std::variant<TranslatedBody, ApiError>;

/// Of /v1/messages. Blocks other than text, tool_use, tool_result and thinking are refused.
[[nodiscard]] ChatBody chat_of_messages(const Json& body, Strictness strictness);

/// Of /v1/responses; `earlier` are the items of the responses that it continues. Items other than
/// messages of text, calls of functions, their outputs and reasoning are refused.
[[nodiscard]] ChatBody chat_of_responses(const Json& body,
                                         const JsonArray& earlier,
                                         Strictness strictness);
/// The items of a body of /v1/responses: a text is the message of a user.
[[nodiscard]] JsonArray response_items(const Json& body);

/// The body of a completion that asks for what a body of SGLang's /generate asks for.
[[nodiscard]] ChatBody completion_of_generate(const Json& body, Strictness strictness);

/// An error about a field of a chat, in the words of the request that the chat was made of: pairs
/// of a name in chats and one in such requests.
using FieldNames = std::vector<std::pair<std::string_view, std::string_view>>;
[[nodiscard]] ApiError renamed(ApiError error, const FieldNames& names);

/// What of a system prompt a model is given: all but a first line "x-anthropic-billing-header:
/// ...", which a client changes with every request, so that no two prompts would begin alike.
[[nodiscard]] std::string_view without_billing_line(std::string_view system);

/// The tool of a chat that a tool of another route is; null: it is left out. Errors go to the
/// route's own fields; `where` is the tool's path in the request.
using ToolOfChat = std::function<Json(const Json& tool, const std::string& where)>;
/// Sets a chat's tools, if any of those of `fields` is one.
void set_tools(FieldReader& fields, const ToolOfChat& tool_of_chat, Json& chat);
/// A tool of a type that this server lacks, kOtherTools, is left out with a line in the log, or
/// refused where fields without effect are.
inline constexpr std::string_view kOtherTools = "tools[].type";
void leave_out_tool(FieldReader& fields,
                    const Json& tool,
                    Strictness strictness,
                    IgnoredFields& ignored);
/// A tool of a chat, or its choice of one: {"type": "function", "function": ...}.
[[nodiscard]] Json function_object(Json function);

/// The member "type" of an object; "" if it has none.
[[nodiscard]] std::string_view member_type(const Json& object);
/// A string that has to be there; `where` is the path of the object in the request.
[[nodiscard]] std::string text_member(FieldReader& fields,
                                      const Json& object,
                                      const char* key,
                                      const std::string& where);

}  // namespace nibble
