#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/answer/answer_form.h"
#include "text/tokenizer.h"

namespace nibble {

/// How many calls an answer has to have.
enum class CallCount : uint8_t { kOne, kOneOrMore };

/// Functions that may be called: the name, and the rule of the arguments.
using CallRules = std::vector<std::pair<std::string, std::string>>;

/// Rules, with `root`, of an answer that is calls alone, in a family's own form, so that
/// AnswerParser reads them. The rules of the arguments are the caller's.
/// Errors: kUnsupported for a form that is none, or whose marks the vocabulary lacks.
Result<std::string> call_grammar(const Tokenizer& tokenizer,
                                 ToolForm form,
                                 const CallRules& functions,
                                 CallCount count);

/// Whether a form marks where a call begins, so that what follows can be held to a grammar while
/// all else is free.
[[nodiscard]] bool marks_calls(ToolForm form);

/// What follows the mark of a call in an answer that is free otherwise.
struct CallTail {
  enum class Next : uint8_t { kText, kEnd };

  std::string mark;         // as text, or the name of a special token
  std::string grammar;      // rules with `root`; those of the arguments are the caller's
  Next next = Next::kText;  // what follows them: anything, or the end of the answer
};
/// Of forms that mark calls, but for harmony, which names the function before its mark.
Result<CallTail> call_tail(const Tokenizer& tokenizer, ToolForm form, const CallRules& functions);

/// `root` for an answer that is what `rule` says: of the channel "final" in harmony, else all of
/// it.
Result<std::string> content_grammar(const Tokenizer& tokenizer,
                                    ReasoningForm form,
                                    std::string_view rule);

}  // namespace nibble
