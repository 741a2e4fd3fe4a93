#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "text/answer/answer_piece.h"

namespace nibble {

/// Calls as the text of one family's call says them; nothing where it is damaged in any part.
using ParsedCalls = std::optional<std::vector<ToolCall>>;

/// Trimmed text of arguments as the model wrote it, where it is a JSON object; {} for none.
std::optional<std::string> arguments_text(std::string_view text);

/// {"name": ..., "arguments": {...}, "id": ...}; "parameters" is another word for arguments, which
/// may also be a string that holds an object.
std::optional<ToolCall> call_of(const Json& json);

/// One object as call_of() reads it (Hermes, Qwen 2.5 and 3).
ParsedCalls parse_hermes_call(std::string_view body);
/// functions.NAME:INDEX<|tool_call_argument_begin|>{...} (Kimi-K2). The id is what is in front.
ParsedCalls parse_kimi_call(std::string_view body);
/// NAME<｜tool▁sep｜>{...} (DeepSeek V3.1), or function<｜tool▁sep｜>NAME, a line break and the
/// arguments as a code block (V3, R1).
ParsedCalls parse_deepseek_call(std::string_view body);
/// A list of objects as call_of() reads them (up to Nemo), or NAME[CALL_ID]ID[ARGS]{...}, where the
/// id may be left out (Mistral Small 3.2, Magistral).
ParsedCalls parse_mistral_calls(std::string_view body);
/// Objects as call_of() reads them, with ";" or blanks between (Llama 3). Names that are not among
/// `functions` make it no call: models answer with JSON, too.
ParsedCalls parse_llama_calls(std::string_view body, std::span<const std::string> functions);

}  // namespace nibble
