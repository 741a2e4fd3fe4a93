#include "text/grammar/call_grammar.h"

#include <optional>

#include <fmt/format.h>

#include "base/json.h"
#include "text/grammar/ebnf.h"

namespace nibble {
namespace {

/// A mark as the model writes it: as its special token, or as text.
std::string mark(const Tokenizer& tokenizer, std::string_view name) {
  const auto id = tokenizer.token_to_id(name);
  return id && tokenizer.is_special(*id) ? ebnf_token(*id) : ebnf_literal(name);
}

bool has_token(const Tokenizer& tokenizer, std::string_view name) {
  const auto id = tokenizer.token_to_id(name);
  return id && tokenizer.is_special(*id);
}

/// One rule for the calls of every function: `write(name, arguments)` joined by "|".
template <typename Write>
std::string each(const CallRules& functions, const Write& write) {
  std::string out = "call ::= ";
  for (size_t i = 0; i < functions.size(); ++i) {
    out += (i == 0 ? "" : " | ") + write(functions[i].first, functions[i].second);
  }
  return out + "\n";
}

/// {"name": "NAME", "arguments": {...}}
std::string as_object(const std::string& name, std::string_view key, const std::string& rule) {
  const std::string head = fmt::format("{{\"name\": {}, \"{}\": ", Json(name).dump(), key);
  return fmt::format("{} {} \"}}\"", ebnf_literal(head), rule);
}

std::string root_of(std::string_view call, std::string_view separator, CallCount count) {
  return count == CallCount::kOne ? fmt::format("root ::= {}\n", call)
                                  : fmt::format("root ::= {} ({} {})*\n", call, separator, call);
}

std::string hermes(const Tokenizer& tokenizer, const CallRules& functions, CallCount count) {
  const std::string call =
      fmt::format("one ::= {} \"\\n\" call \"\\n\" {}\n", mark(tokenizer, "<tool_call>"),
                  mark(tokenizer, "</tool_call>"));
  return each(functions, [](const auto& name,
                            const auto& rule) { return as_object(name, "arguments", rule); }) +
         call + root_of("one", "\"\\n\"", count);
}

std::string llama(const CallRules& functions, CallCount count) {
  return each(functions, [](const auto& name,
                            const auto& rule) { return as_object(name, "parameters", rule); }) +
         root_of("call", "\"; \"", count);
}

std::string mistral(const Tokenizer& tokenizer, const CallRules& functions, CallCount count) {
  const std::string begin = mark(tokenizer, "[TOOL_CALLS]");
  if (has_token(tokenizer, "[ARGS]")) {
    const std::string arguments = mark(tokenizer, "[ARGS]");
    return each(functions,
                [&](const auto& name, const auto& rule) {
                  return fmt::format("{} {} {} {}", begin, ebnf_literal(name), arguments, rule);
                }) +
           root_of("call", "\"\"", count);
  }
  const std::string more = count == CallCount::kOne ? "" : " (\", \" call)*";
  return each(functions, [](const auto& name,
                            const auto& rule) { return as_object(name, "arguments", rule); }) +
         fmt::format("root ::= {} \" \"? \"[\" call{} \"]\"\n", begin, more);
}

std::string kimi(const Tokenizer& tokenizer, const CallRules& functions, CallCount count) {
  const auto write = [&](const std::string& name, const std::string& rule) {
    return fmt::format("{} {} [0-9] {} {} {}", mark(tokenizer, "<|tool_call_begin|>"),
                       ebnf_literal("functions." + name + ":"),
                       mark(tokenizer, "<|tool_call_argument_begin|>"), rule,
                       mark(tokenizer, "<|tool_call_end|>"));
  };
  return each(functions, write) +
         fmt::format("root ::= {} calls {}\n", mark(tokenizer, "<|tool_calls_section_begin|>"),
                     mark(tokenizer, "<|tool_calls_section_end|>")) +
         (count == CallCount::kOne ? "calls ::= call\n" : "calls ::= call call*\n");
}

std::string deepseek(const Tokenizer& tokenizer, const CallRules& functions, CallCount count) {
  const auto write = [&](const std::string& name, const std::string& rule) {
    return fmt::format("{} {} {} {} {}", mark(tokenizer, "<｜tool▁call▁begin｜>"),
                       ebnf_literal(name), mark(tokenizer, "<｜tool▁sep｜>"), rule,
                       mark(tokenizer, "<｜tool▁call▁end｜>"));
  };
  return each(functions, write) +
         fmt::format("root ::= {} calls {}\n", mark(tokenizer, "<｜tool▁calls▁begin｜>"),
                     mark(tokenizer, "<｜tool▁calls▁end｜>")) +
         (count == CallCount::kOne ? "calls ::= call\n" : "calls ::= call call*\n");
}

/// Messages of thought, which may come before others in harmony.
std::string harmony_thoughts(const Tokenizer& tokenizer) {
  return fmt::format("thought ::= {} \"analysis\" {} [^\\x00]* {} {} \"assistant\"\n",
                     mark(tokenizer, "<|channel|>"), mark(tokenizer, "<|message|>"),
                     mark(tokenizer, "<|end|>"), mark(tokenizer, "<|start|>"));
}

Status check_harmony(const Tokenizer& tokenizer) {
  for (const char* name : {"<|channel|>", "<|message|>", "<|end|>", "<|start|>"}) {
    if (!has_token(tokenizer, name)) {
      return make_error(StatusCode::kUnsupported,
                        "the vocabulary lacks {}, which harmony's answers need", name);
    }
  }
  return {};
}

/// One call: the model ends its answer with it.
std::string harmony(const Tokenizer& tokenizer, const CallRules& functions) {
  const auto write = [&](const std::string& name, const std::string& rule) {
    const std::string constrain =
        has_token(tokenizer, "<|constrain|>") ? mark(tokenizer, "<|constrain|>") : "\"\"";
    return fmt::format("{} {} {} \"json\" {} {}", mark(tokenizer, "<|channel|>"),
                       ebnf_literal("commentary to=functions." + name + " "), constrain,
                       mark(tokenizer, "<|message|>"), rule);
  };
  return each(functions, write) + harmony_thoughts(tokenizer) + "root ::= thought* call\n";
}

}  // namespace

Result<std::string> call_grammar(const Tokenizer& tokenizer,
                                 ToolForm form,
                                 const CallRules& functions,
                                 CallCount count) {
  switch (form) {
    case ToolForm::kHermes:
      return hermes(tokenizer, functions, count);
    case ToolForm::kLlama:
      return llama(functions, count);
    case ToolForm::kMistral:
      return mistral(tokenizer, functions, count);
    case ToolForm::kKimi:
      return kimi(tokenizer, functions, count);
    case ToolForm::kDeepSeek:
      return deepseek(tokenizer, functions, count);
    case ToolForm::kHarmony:
      NIBBLE_RETURN_IF_ERROR(check_harmony(tokenizer));
      return harmony(tokenizer, functions);
    case ToolForm::kNone:
      break;
  }
  return make_error(StatusCode::kUnsupported,
                    "how this model writes calls is not known; name the form with "
                    "--tool-call-parser");
}

Result<std::string> content_grammar(const Tokenizer& tokenizer,
                                    ReasoningForm form,
                                    std::string_view rule) {
  if (form != ReasoningForm::kHarmony) {
    return fmt::format("root ::= {}\n", rule);
  }
  NIBBLE_RETURN_IF_ERROR(check_harmony(tokenizer));
  return harmony_thoughts(tokenizer) + fmt::format("root ::= thought* {} \"final\" {} {}\n",
                                                   mark(tokenizer, "<|channel|>"),
                                                   mark(tokenizer, "<|message|>"), rule);
}

}  // namespace nibble
