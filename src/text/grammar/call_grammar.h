#pragma once

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

/// `root` for an answer that is what `rule` says: of the channel "final" in harmony, else all of
/// it.
Result<std::string> content_grammar(const Tokenizer& tokenizer,
                                    ReasoningForm form,
                                    std::string_view rule);

}  // namespace nibble
