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
    NIBBLE_ASSIGN_OR_RETURN(rule, check_regex(asked.text, RegexPlace::kText));
  } else if (asked.kind == Kind::kChoice) {
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

/// Arguments as the tool's schema has them. A schema that cannot be enforced is an error for a
/// strict tool; for others any object will do, as for servers that enforce nothing.
std::variant<std::string, ApiError> arguments_rule(const Tool& tool, JsonSchemaGrammar& schemas) {
  const Json* parameters = tool.function->find("parameters");
  const Json* strict = tool.function->find("strict");
  if (parameters == nullptr || parameters->is_null()) {
    return std::string(JsonSchemaGrammar::any_object());
  }
  auto rule = schemas.add(*parameters);
  if (rule.ok()) {
    return std::move(rule).value();
  }
  if (strict != nullptr && strict->is_bool() && strict->as_bool()) {
    return refused(tool.param, rule.status());
  }
  NIBBLE_LOG(kWarning, "arguments of a tool that is not strict are any object: {}",
             Json(rule.status().message()).dump());
  return std::string(JsonSchemaGrammar::any_object());
}

std::variant<GrammarText, ApiError> calls_text(const Tokenizer& tokenizer,
                                               ToolForm form,
                                               const GenerationRequest& request) {
  JsonSchemaGrammar schemas;
  CallRules functions;
  for (const Tool& tool : tools_of(request)) {
    auto rule = arguments_rule(tool, schemas);
    if (const auto* error = std::get_if<ApiError>(&rule)) {
      return *error;
    }
    functions.emplace_back(tool.function->find("name")->as_string(),
                           std::move(std::get<std::string>(rule)));
  }
  const bool one = !request.calls.function.empty() || !request.parallel_tool_calls;
  auto calls =
      call_grammar(tokenizer, form, functions, one ? CallCount::kOne : CallCount::kOneOrMore);
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
  if (request.ignore_eos) {
    return error("ignore_eos", "an answer of a given form ends where the form does; leave it out");
  }
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

AskedGrammar AnswerGrammars::find(const GenerationRequest& request, AnswerForm form) const {
  if (request.form.kind == Kind::kFree && !request.calls.required) {
    return std::shared_ptr<const Grammar>();
  }
  if (auto error = conflict(request)) {
    return *std::move(error);
  }
  const std::string param = request.calls.required ? "tool_choice" : request.form.param;
  if (compiler_ == nullptr) {
    return refused(param, Status(StatusCode::kUnsupported,
                                 "the model has no end token, by which such an answer could end"));
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
  auto grammar = compiler_->compile(text);
  if (!grammar.ok()) {
    return refused(param, grammar.status());
  }
  return std::move(grammar).value();
}

}  // namespace nibble
