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

/// A rule for what is written of the call of any function: `write(name, arguments)` joined by "|".
template <typename Write>
std::string each(std::string_view rule, const CallRules& functions, const Write& write) {
  std::string out = fmt::format("{} ::= ", rule);
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

/// Rules of a rule for a call that begins with a mark: `call` is what stands behind it.
struct MarkedCall {
  std::string_view begin;  // the mark; a constant
  std::string rules;
};

MarkedCall hermes(const Tokenizer& tokenizer, const CallRules& functions) {
  const auto write = [](const auto& name, const auto& rule) {
    return as_object(name, "arguments", rule);
  };
  return {"<tool_call>",
          each("object", functions, write) +
              fmt::format("call ::= \"\\n\" object \"\\n\" {}\n", mark(tokenizer, "</tool_call>"))};
}

/// A list of calls, or name and arguments of one.
MarkedCall mistral(const Tokenizer& tokenizer, const CallRules& functions, CallCount count) {
  constexpr std::string_view kBegin = "[TOOL_CALLS]";
  if (has_token(tokenizer, "[ARGS]")) {
    const std::string arguments = mark(tokenizer, "[ARGS]");
    return {kBegin, each("call", functions, [&](const auto& name, const auto& rule) {
              return fmt::format("{} {} {}", ebnf_literal(name), arguments, rule);
            })};
  }
  const auto write = [](const auto& name, const auto& rule) {
    return as_object(name, "arguments", rule);
  };
  const std::string more = count == CallCount::kOne ? "" : " (\", \" object)*";
  return {kBegin, each("object", functions, write) +
                      fmt::format("call ::= \" \"? \"[\" object{} \"]\"\n", more)};
}

MarkedCall kimi(const Tokenizer& tokenizer, const CallRules& functions) {
  const auto write = [&](const std::string& name, const std::string& rule) {
    return fmt::format("{} [0-9] [0-9]? {} {} {}", ebnf_literal("functions." + name + ":"),
                       mark(tokenizer, "<|tool_call_argument_begin|>"), rule,
                       mark(tokenizer, "<|tool_call_end|>"));
  };
  return {"<|tool_call_begin|>", each("call", functions, write)};
}

MarkedCall deepseek(const Tokenizer& tokenizer, const CallRules& functions) {
  const auto write = [&](const std::string& name, const std::string& rule) {
    return fmt::format("{} {} {} {}", ebnf_literal(name), mark(tokenizer, "<｜tool▁sep｜>"), rule,
                       mark(tokenizer, "<｜tool▁call▁end｜>"));
  };
  return {"<｜tool▁call▁begin｜>", each("call", functions, write)};
}

Result<MarkedCall> marked_call(const Tokenizer& tokenizer,
                               ToolForm form,
                               const CallRules& functions,
                               CallCount count) {
  switch (form) {
    case ToolForm::kHermes:
      return hermes(tokenizer, functions);
    case ToolForm::kMistral:
      return mistral(tokenizer, functions, count);
    case ToolForm::kKimi:
      return kimi(tokenizer, functions);
    case ToolForm::kDeepSeek:
      return deepseek(tokenizer, functions);
    default:
      return make_error(StatusCode::kUnsupported,
                        "how this model writes calls is not known; name the form with "
                        "--tool-call-parser");
  }
}

/// What stands around all calls of an answer that has nothing else, and between them.
struct CallFrame {
  std::string begin, separator, end;
};

CallFrame frame_of(const Tokenizer& tokenizer, ToolForm form) {
  switch (form) {
    case ToolForm::kKimi:
      return {mark(tokenizer, "<|tool_calls_section_begin|>"), "",
              mark(tokenizer, "<|tool_calls_section_end|>")};
    case ToolForm::kDeepSeek:
      return {mark(tokenizer, "<｜tool▁calls▁begin｜>"), "",
              mark(tokenizer, "<｜tool▁calls▁end｜>")};
    case ToolForm::kHermes:
      return {"", "\"\\n\"", ""};
    default:
      return {};
  }
}

/// Whether a form's mark can begin another call.
bool repeats(const Tokenizer& tokenizer, ToolForm form, CallCount count) {
  const bool list = form == ToolForm::kMistral && !has_token(tokenizer, "[ARGS]");
  return count == CallCount::kOneOrMore && !list;
}

std::string llama(const CallRules& functions, CallCount count) {
  const auto write = [](const auto& name, const auto& rule) {
    return as_object(name, "parameters", rule);
  };
  return each("call", functions, write) +
         (count == CallCount::kOne ? "root ::= call\n" : "root ::= call (\"; \" call)*\n");
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
  return each("call", functions, write) + harmony_thoughts(tokenizer) + "root ::= thought* call\n";
}

}  // namespace

Result<std::string> call_grammar(const Tokenizer& tokenizer,
                                 ToolForm form,
                                 const CallRules& functions,
                                 CallCount count) {
  if (form == ToolForm::kLlama) {
    return llama(functions, count);
  }
  if (form == ToolForm::kHarmony) {
    NIBBLE_RETURN_IF_ERROR(check_harmony(tokenizer));
    return harmony(tokenizer, functions);
  }
  NIBBLE_ASSIGN_OR_RETURN(const MarkedCall call, marked_call(tokenizer, form, functions, count));
  const CallFrame frame = frame_of(tokenizer, form);
  const std::string more =
      repeats(tokenizer, form, count) ? fmt::format("({} one)*", frame.separator) : "";
  return call.rules + fmt::format("one ::= {} call\nroot ::= {} one {} {}\n",
                                  mark(tokenizer, call.begin), frame.begin, more, frame.end);
}

bool marks_calls(ToolForm form) { return form != ToolForm::kNone && form != ToolForm::kLlama; }

Result<CallTail> call_tail(const Tokenizer& tokenizer, ToolForm form, const CallRules& functions) {
  const auto count = CallCount::kOneOrMore;
  NIBBLE_ASSIGN_OR_RETURN(const MarkedCall call, marked_call(tokenizer, form, functions, count));
  CallTail tail{.mark = std::string(call.begin), .grammar = call.rules};
  if (form == ToolForm::kMistral) {  // its calls have no end but that of the answer
    const std::string more = fmt::format("({} call)*", mark(tokenizer, call.begin));
    tail.grammar += fmt::format("root ::= call {}\n", repeats(tokenizer, form, count) ? more : "");
    tail.next = CallTail::Next::kEnd;
  } else {
    tail.grammar += "root ::= call\n";
  }
  return tail;
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
