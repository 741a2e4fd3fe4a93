#include "text/answer/answer_form.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "text/answer/trimmed_text.h"

namespace nibble {
namespace {

template <typename Form>
using Name = std::pair<std::string_view, Form>;

// The first name of a form is the one that is shown.
constexpr std::array kReasoningNames = {
    Name<ReasoningForm>{"none", ReasoningForm::kNone},
    Name<ReasoningForm>{"think", ReasoningForm::kThink},
    Name<ReasoningForm>{"qwen3", ReasoningForm::kThink},
    Name<ReasoningForm>{"qwen3-thinking", ReasoningForm::kThink},
    Name<ReasoningForm>{"deepseek-r1", ReasoningForm::kThink},
    Name<ReasoningForm>{"deepseek-v3", ReasoningForm::kThink},
    Name<ReasoningForm>{"kimi", ReasoningForm::kThink},
    Name<ReasoningForm>{"kimi-k2", ReasoningForm::kThink},
    Name<ReasoningForm>{"mistral", ReasoningForm::kMistral},
    Name<ReasoningForm>{"gpt-oss", ReasoningForm::kHarmony},
    Name<ReasoningForm>{"openai-gptoss", ReasoningForm::kHarmony},
    Name<ReasoningForm>{"openai", ReasoningForm::kHarmony},
};
constexpr std::array kToolNames = {
    Name<ToolForm>{"none", ToolForm::kNone},
    Name<ToolForm>{"hermes", ToolForm::kHermes},
    Name<ToolForm>{"qwen", ToolForm::kHermes},
    Name<ToolForm>{"qwen25", ToolForm::kHermes},
    Name<ToolForm>{"llama3-json", ToolForm::kLlama},
    Name<ToolForm>{"llama3", ToolForm::kLlama},
    Name<ToolForm>{"mistral", ToolForm::kMistral},
    Name<ToolForm>{"kimi-k2", ToolForm::kKimi},
    Name<ToolForm>{"deepseek-v31", ToolForm::kDeepSeek},
    Name<ToolForm>{"deepseekv31", ToolForm::kDeepSeek},
    Name<ToolForm>{"deepseek-v3", ToolForm::kDeepSeek},
    Name<ToolForm>{"deepseekv3", ToolForm::kDeepSeek},
    Name<ToolForm>{"gpt-oss", ToolForm::kHarmony},
    Name<ToolForm>{"openai", ToolForm::kHarmony},
};

template <typename Form>
Result<Form> find(std::span<const Name<Form>> names, std::string_view wanted) {
  std::string name(wanted);
  std::ranges::replace(name, '_', '-');
  std::string all;
  for (const auto& [each, form] : names) {
    if (each == name) {
      return form;
    }
    all += all.empty() ? "" : ", ";
    all += each;
  }
  return make_error(StatusCode::kInvalidArgument, "\"{}\" is none of {}", wanted, all);
}

template <typename Form>
std::string_view name_of(std::span<const Name<Form>> names, Form form) {
  for (const auto& [name, each] : names) {
    if (each == form) {
      return name;
    }
  }
  return {};
}

ToolForm detect_tools(const Tokenizer& tokenizer, std::string_view source) {
  const auto has = [&](std::string_view token) { return tokenizer.token_to_id(token).has_value(); };
  const auto says = [&](std::string_view text) { return source.find(text) != source.npos; };
  if (has("<|tool_calls_section_begin|>")) {
    return ToolForm::kKimi;
  }
  if (has("<｜tool▁calls▁begin｜>") || says("<｜tool▁calls▁begin｜>")) {
    return ToolForm::kDeepSeek;
  }
  if (has("[TOOL_CALLS]") || says("[TOOL_CALLS]")) {
    return ToolForm::kMistral;
  }
  if (says("<tool_call>")) {
    return ToolForm::kHermes;
  }
  if (has("<|python_tag|>") || says("<|python_tag|>")) {
    return ToolForm::kLlama;
  }
  return ToolForm::kNone;
}

}  // namespace

AnswerForm detect_answer_form(const Tokenizer& tokenizer, std::string_view source) {
  const auto has = [&](std::string_view token) { return tokenizer.token_to_id(token).has_value(); };
  if (has("<|channel|>") && has("<|message|>")) {
    return {ReasoningForm::kHarmony, ToolForm::kHarmony};
  }
  AnswerForm form{ReasoningForm::kNone, detect_tools(tokenizer, source)};
  if (source.find("[THINK]") != source.npos) {
    form.reasoning = ReasoningForm::kMistral;
  } else if (has("<think>") || source.find("<think>") != source.npos) {
    form.reasoning = ReasoningForm::kThink;
  }
  return form;
}

Result<ReasoningForm> find_reasoning_form(std::string_view name) {
  return find<ReasoningForm>(kReasoningNames, name);
}

Result<ToolForm> find_tool_form(std::string_view name) { return find<ToolForm>(kToolNames, name); }

std::string_view reasoning_form_name(ReasoningForm form) {
  return name_of<ReasoningForm>(kReasoningNames, form);
}

std::string_view tool_form_name(ToolForm form) { return name_of<ToolForm>(kToolNames, form); }

bool ends_in_thought(std::string_view prompt, ReasoningForm form) {
  prompt = prompt.substr(0, prompt.find_last_not_of(kBlanks) + 1);
  return (form == ReasoningForm::kThink && prompt.ends_with("<think>")) ||
         (form == ReasoningForm::kMistral && prompt.ends_with("[THINK]"));
}

}  // namespace nibble
