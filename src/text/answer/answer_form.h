#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "text/tokenizer.h"

namespace nibble {

/// How a family of models writes what it thinks. kHarmony goes with kHarmony below.
enum class ReasoningForm : uint8_t { kNone, kThink, kMistral, kHarmony };
/// How it writes calls of tools.
enum class ToolForm : uint8_t { kNone, kHermes, kLlama, kMistral, kKimi, kDeepSeek, kHarmony };

/// How a model writes its answers.
struct AnswerForm {
  ReasoningForm reasoning = ReasoningForm::kNone;
  ToolForm tools = ToolForm::kNone;

  constexpr bool operator==(const AnswerForm&) const = default;
};

/// What a model's vocabulary and the source of its chat template say.
[[nodiscard]] AnswerForm detect_answer_form(const Tokenizer& tokenizer, std::string_view source);

/// The names that vLLM and SGLang have for their parsers ("qwen3", "deepseek_r1"), with _ or -, and
/// "none". kInvalidArgument with all names for others.
[[nodiscard]] Result<ReasoningForm> find_reasoning_form(std::string_view name);
[[nodiscard]] Result<ToolForm> find_tool_form(std::string_view name);
[[nodiscard]] std::string_view reasoning_form_name(ReasoningForm form);
[[nodiscard]] std::string_view tool_form_name(ToolForm form);

/// Whether a prompt ends where the model is thinking already: with the opening of a thought.
[[nodiscard]] bool ends_in_thought(std::string_view prompt, ReasoningForm form);

}  // namespace nibble
