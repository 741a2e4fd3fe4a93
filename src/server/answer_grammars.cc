#include "server/answer_grammars.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "base/log.h"
#include "text/grammar/call_grammar.h"
#include "text/grammar/ebnf.h"
#include "text/grammar/ebnf_check.h"
#include "text/grammar/grammar_cost.h"
#include "text/grammar/json_schema_grammar.h"
#include "text/grammar/regex_check.h"

namespace nibble {
namespace {

using Kind = AskedForm::Kind;

constexpr unsigned kMostThreads = 8;

ApiError refused(const std::string& param, const Status& status) {
  return {400, fmt::format("{}: {}", param, status.message()), param, ""};
}

/// The grammar of a choice, a regular expression or a schema; a rule and those that it needs.
Result<GrammarText> form_text(const Tokenizer& tokenizer,
                              ReasoningForm reasoning,
                              const AskedForm& asked) {
  GrammarText out;
  std::string rule;
  if (asked.kind == Kind::kEbnf) {
    NIBBLE_RETURN_IF_ERROR(check_ebnf(asked.text));
    if (reasoning == ReasoningForm::kHarmony) {
      return make_error(StatusCode::kUnsupported,
                        "a grammar of its own cannot be put into this model's messages; use a "
                        "schema, a regular expression or a choice");
    }
    out.ebnf = asked.text;
    return out;
  }
  if (asked.kind == Kind::kRegex) {
    NIBBLE_ASSIGN_OR_RETURN(CheckedRegex regex, check_regex(asked.text, RegexPlace::kText));
    rule = std::move(regex.ebnf);
  } else if (asked.kind == Kind::kChoice) {
    size_t bytes = 0;
    for (const std::string& choice : asked.choices) {
      bytes += choice.size();
    }
    if (static_cast<int64_t>(bytes) * kLiteralCost > kMostGrammarCost) {
      return make_error(StatusCode::kInvalidArgument,
                        "the choices have {} bytes, but at most {} are allowed", bytes,
                        kMostGrammarCost / kLiteralCost);
    }
    for (const std::string& choice : asked.choices) {
      rule += (rule.empty() ? "" : " | ") + ebnf_literal(choice);
    }
    rule = "(" + rule + ")";
  } else {
    JsonSchemaGrammar schema;
    rule = JsonSchemaGrammar::any_object();
    if (asked.kind == Kind::kJsonSchema) {
      NIBBLE_ASSIGN_OR_RETURN(rule, schema.add(asked.schema));
    }
    out.ebnf = schema.text();
    out.shortest_limit = schema.shortest_limit();
  }
  NIBBLE_ASSIGN_OR_RETURN(const std::string root, content_grammar(tokenizer, reasoning, rule));
  out.ebnf += root;
  return out;
}

/// The place of a function among the tools, and its object.
struct Tool {
  std::string param;
  const Json* function;
};

std::vector<Tool> tools_of(const GenerationRequest& request) {
  std::vector<Tool> out;
  const JsonArray& tools = request.tools.as_array();
  for (size_t i = 0; i < tools.size(); ++i) {
    const Json* function = tools[i].find("function");
    const std::string& name = function->find("name")->as_string();
    if (request.calls.function.empty() || request.calls.function == name) {
      out.push_back({fmt::format("tools[{}].function.parameters", i), function});
    }
  }
  return out;
}

bool is_strict(const Json& function) {
  const Json* strict = function.find("strict");
  return strict != nullptr && strict->is_bool() && strict->as_bool();
}

/// Which tools' arguments are held to their schemas.
enum class Enforced : uint8_t {
  kStrict,
  kPossible,  // those that can be, too
};

/// Arguments as the tool's schema has them. A schema that cannot be enforced is an error for a
/// strict tool; for others any object will do, as for servers that enforce nothing.
std::variant<std::string, ApiError> arguments_rule(const Tool& tool,
                                                   Enforced enforced,
                                                   JsonSchemaGrammar& schemas) {
  const Json* parameters = tool.function->find("parameters");
  const bool strict = is_strict(*tool.function);
  if (parameters == nullptr || parameters->is_null() ||
      (!strict && enforced == Enforced::kStrict)) {
    return std::string(JsonSchemaGrammar::any_object());
  }
  auto rule = schemas.add(*parameters);
  if (rule.ok()) {
    return std::move(rule).value();
  }
  if (strict) {
    return refused(tool.param, rule.status());
  }
  NIBBLE_LOG(kWarning, "arguments of a tool that is not strict are any object: {}",
             Json(rule.status().message()).dump());
  return std::string(JsonSchemaGrammar::any_object());
}

/// The rules of all functions that may be called.
std::variant<CallRules, ApiError> call_rules(const GenerationRequest& request,
                                             Enforced enforced,
                                             JsonSchemaGrammar& schemas) {
  CallRules functions;
  for (const Tool& tool : tools_of(request)) {
    auto rule = arguments_rule(tool, enforced, schemas);
    if (auto* error = std::get_if<ApiError>(&rule)) {
      return std::move(*error);
    }
    functions.emplace_back(tool.function->find("name")->as_string(),
                           std::move(std::get<std::string>(rule)));
  }
  return functions;
}

std::variant<GrammarText, ApiError> calls_text(const Tokenizer& tokenizer,
                                               ToolForm form,
                                               const GenerationRequest& request) {
  JsonSchemaGrammar schemas;
  auto functions = call_rules(request, Enforced::kPossible, schemas);
  if (auto* error = std::get_if<ApiError>(&functions)) {
    return std::move(*error);
  }
  const bool one = !request.calls.function.empty() || !request.parallel_tool_calls;
  auto calls = call_grammar(tokenizer, form, std::get<CallRules>(functions),
                            one ? CallCount::kOne : CallCount::kOneOrMore);
  if (!calls.ok()) {
    return refused("tool_choice", calls.status());
  }
  return GrammarText{.ebnf = schemas.text() + *calls, .shortest_limit = schemas.shortest_limit()};
}

/// What cannot go with a form: fields that forbid its end.
std::optional<ApiError> conflict(const GenerationRequest& request) {
  const auto error = [](const char* param, const char* why) {
    return ApiError{400, fmt::format("{}: {}", param, why), param, ""};
  };
  if (request.min_tokens > 0) {
    return error("min_tokens", "an answer of a given form ends where the form does; leave it out");
  }
  if (!request.bad_words.empty() || !request.sampling.allowed_tokens.empty()) {
    return error(request.bad_words.empty() ? "allowed_token_ids" : "bad_words",
                 "beside the form that is asked for it may leave no token; leave it out");
  }
  if (request.calls.required && request.form.kind != Kind::kFree) {
    return error("tool_choice",
                 "calls are required and another form is asked for; keep one of them");
  }
  return std::nullopt;
}

}  // namespace

AnswerGrammars::AnswerGrammars(const Tokenizer& tokenizer,
                               int64_t vocab_size,
                               std::span<const int64_t> ends)
    : tokenizer_(tokenizer) {
  if (std::ranges::any_of(ends, [&](int64_t end) { return end >= 0 && end < vocab_size; })) {
    const unsigned threads = std::clamp(std::thread::hardware_concurrency() / 2, 1U, kMostThreads);
    compiler_ = std::make_unique<GrammarCompiler>(
        tokenizer, vocab_size, ends, GrammarOptions{.threads = static_cast<int>(threads)});
  }
}

bool has_strict_tools(const GenerationRequest& request) {
  return request.tools.is_array() &&
         std::ranges::any_of(request.tools.as_array(),
                             [](const Json& tool) { return is_strict(*tool.find("function")); });
}

/// Finding those of special tokens and texts takes a look at all tokens.
std::shared_ptr<const CallMark> AnswerGrammars::call_mark(const std::string& text) const {
  const std::lock_guard lock(mutex_);
  if (mark_ == nullptr || mark_->text() != text) {
    mark_ = std::make_shared<const CallMark>(tokenizer_, text);
  }
  return mark_;
}

AnswerGrammars::Compiled AnswerGrammars::compile(const GrammarText& text, Effort effort) const {
  if (effort == Effort::kMake) {
    return compiler_->compile(text);
  }
  auto known = compiler_->known(text);
  return known == nullptr ? Compiled() : Compiled(std::move(known));
}

/// Of messages to strict functions; the others are free.
std::optional<AskedGrammar> AnswerGrammars::find_harmony_calls(const GenerationRequest& request,
                                                               Effort effort) const {
  ArgumentGrammars arguments;
  const auto budget = std::make_shared<SchemaBudget>();
  for (const Tool& tool : tools_of(request)) {
    if (!is_strict(*tool.function)) {
      continue;
    }
    JsonSchemaGrammar schemas(budget);
    auto rule = arguments_rule(tool, Enforced::kStrict, schemas);
    if (auto* error = std::get_if<ApiError>(&rule)) {
      return std::move(*error);
    }
    auto grammar =
        compile({.ebnf = schemas.text() + "root ::= " + std::get<std::string>(rule) + "\n",
                 .shortest_limit = schemas.shortest_limit()},
                effort);
    if (!grammar) {
      return std::nullopt;
    }
    if (!grammar->ok()) {
      return refused(tool.param, grammar->status());
    }
    arguments.emplace(tool.function->find("name")->as_string(), grammar->value());
  }
  return gated_harmony_calls(tokenizer_, std::move(arguments));
}

/// Of answers that are free, but for the calls in them.
std::optional<AskedGrammar> AnswerGrammars::find_calls(const GenerationRequest& request,
                                                       ToolForm form,
                                                       Effort effort) const {
  if (form == ToolForm::kHarmony) {
    return find_harmony_calls(request, effort);
  }
  JsonSchemaGrammar schemas;
  auto functions = call_rules(request, Enforced::kStrict, schemas);
  if (auto* error = std::get_if<ApiError>(&functions)) {
    return std::move(*error);
  }
  auto tail = call_tail(tokenizer_, form, std::get<CallRules>(functions));
  if (!tail.ok()) {
    return refused("tools", tail.status());
  }
  auto grammar = compile(
      {.ebnf = schemas.text() + tail->grammar, .shortest_limit = schemas.shortest_limit()}, effort);
  if (!grammar) {
    return std::nullopt;
  }
  if (!grammar->ok()) {
    return refused("tools", grammar->status());
  }
  return gated_calls(tokenizer_, call_mark(tail->mark), grammar->value(), tail->next);
}

std::optional<AskedGrammar> AnswerGrammars::find(const GenerationRequest& request,
                                                 AnswerForm form,
                                                 Effort effort) const {
  const bool free = request.form.kind == Kind::kFree && !request.calls.required;
  if (free && (!has_strict_tools(request) || !marks_calls(form.tools))) {
    return std::shared_ptr<const Grammar>();
  }
  if (auto error = conflict(request)) {
    return *std::move(error);
  }
  std::string param = free ? "tools" : request.form.param;
  if (request.calls.required) {
    param = "tool_choice";
  }
  if (compiler_ == nullptr) {
    return refused(param, Status(StatusCode::kUnsupported,
                                 "the model has no end token, by which such an answer could end"));
  }
  if (free) {
    return find_calls(request, form.tools, effort);
  }
  GrammarText text;
  if (request.calls.required) {
    auto calls = calls_text(tokenizer_, form.tools, request);
    if (auto* error = std::get_if<ApiError>(&calls)) {
      return std::move(*error);
    }
    text = std::move(std::get<GrammarText>(calls));
  } else {
    auto asked = form_text(tokenizer_, form.reasoning, request.form);
    if (!asked.ok()) {
      return refused(param, asked.status());
    }
    text = std::move(asked).value();
  }
  auto grammar = compile(text, effort);
  if (!grammar) {
    return std::nullopt;
  }
  if (!grammar->ok()) {
    return refused(param, grammar->status());
  }
  return grammar->value();
}

}  // namespace nibble
