#pragma once

#include <memory>
#include <span>
#include <variant>

#include "server/schema.h"
#include "text/answer/answer_form.h"
#include "text/grammar/grammar.h"
#include "text/tokenizer.h"

namespace nibble {

/// What the answers of a request have to obey: null where they are free.
using AskedGrammar = std::variant<std::shared_ptr<const Grammar>, ApiError>;

/// Makes grammars of what requests ask for, and keeps them for the next ones. Thread-safe.
class AnswerGrammars final {
 public:
  /// `ends`: tokens that end an answer; without any, requests for a form are refused.
  AnswerGrammars(const Tokenizer& tokenizer, int64_t vocab_size, std::span<const int64_t> ends);

  /// The grammar of the answers, in the form of a model's calls and thoughts. Errors name the
  /// field: a schema that cannot be enforced (with a JSON pointer), what is no grammar, fields that
  /// go against each other.
  [[nodiscard]] AskedGrammar find(const GenerationRequest& request, AnswerForm form) const;

 private:
  const Tokenizer& tokenizer_;
  std::unique_ptr<GrammarCompiler> compiler_;  // null without end tokens
};

}  // namespace nibble
