#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <variant>

#include "server/schema.h"
#include "text/answer/answer_form.h"
#include "text/grammar/call_gate.h"
#include "text/grammar/grammar.h"
#include "text/tokenizer.h"

namespace nibble {

/// Whether one of a request's tools is strict, and the model may or has to call it.
[[nodiscard]] bool has_strict_tools(const GenerationRequest& request);

/// What the answers of a request have to obey: null where they are free.
using AskedGrammar = std::variant<std::shared_ptr<const Grammar>, ApiError>;

/// Whether what is not known may be made, which can take seconds.
enum class Effort : uint8_t { kLookUp, kMake };

/// Makes grammars of what requests ask for, and keeps them for the next ones. Thread-safe.
class AnswerGrammars final {
 public:
  /// `ends`: tokens that end an answer; without any, requests for a form are refused.
  AnswerGrammars(const Tokenizer& tokenizer, int64_t vocab_size, std::span<const int64_t> ends);

  /// The grammar of the answers, in the form of a model's calls and thoughts. Where no form is
  /// asked for, calls of strict tools have one, if the model marks calls (marks_calls()). Errors
  /// name the field: a schema that cannot be enforced (with a JSON pointer), what is no grammar,
  /// fields that go against each other. Nothing where one is needed that is not known, with
  /// kLookUp.
  [[nodiscard]] std::optional<AskedGrammar> find(const GenerationRequest& request,
                                                 AnswerForm form,
                                                 Effort effort) const;

 private:
  using Compiled = std::optional<Result<std::shared_ptr<const Grammar>>>;

  [[nodiscard]] Compiled compile(const GrammarText& text, Effort effort) const;
  [[nodiscard]] std::optional<AskedGrammar> find_calls(const GenerationRequest& request,
                                                       ToolForm form,
                                                       Effort effort) const;
  [[nodiscard]] std::optional<AskedGrammar> find_harmony_calls(const GenerationRequest& request,
                                                               Effort effort) const;
  [[nodiscard]] std::shared_ptr<const CallMark> call_mark(const std::string& text) const;

  const Tokenizer& tokenizer_;
  std::unique_ptr<GrammarCompiler> compiler_;  // null without end tokens
  mutable std::mutex mutex_;                   // guards what follows
  mutable std::shared_ptr<const CallMark> mark_;
};

}  // namespace nibble
