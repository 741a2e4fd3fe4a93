// Makes a grammar of the input: of a JSON schema, of a regular expression, of EBNF, of a pattern
// within a schema or of tools and a form of calls, as its first byte says, compiles it and walks
// through an answer: no crash, no leak, bounded time; where a schema was taken, a finished answer
// is JSON, and the calls of tools are those that the parser of the form finds.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/log.h"
#include "text/answer/answer_stream.h"
#include "text/grammar/call_gate.h"
#include "text/grammar/call_grammar.h"
#include "text/grammar/ebnf_check.h"
#include "text/grammar/json_schema_grammar.h"
#include "text/grammar/regex_check.h"
#include "text/grammar/testing/byte_grammar.h"

namespace {

using nibble::CallRules;
using nibble::GrammarText;
using nibble::Json;
using nibble::JsonSchemaGrammar;
using nibble::ReasoningForm;
using nibble::ToolForm;

constexpr uint8_t kKinds = 5;
enum Kind : uint8_t { kSchema, kRegex, kEbnf, kPattern, kTools };
constexpr ToolForm kForms[] = {ToolForm::kHermes, ToolForm::kLlama,    ToolForm::kMistral,
                               ToolForm::kKimi,   ToolForm::kDeepSeek, ToolForm::kHarmony};

void check(bool holds) {
  if (!holds) {
    std::abort();
  }
}

nibble::ByteGrammars& grammars() {
  static nibble::ByteGrammars made(nibble::call_marks(),
                                   {"\"a", "ab\"", "\":", "12", "\\u00", "é", "l>\n"});
  return made;
}

GrammarText schema_text(const Json& json) {
  JsonSchemaGrammar schema;
  const auto root = schema.add(json);
  return root.ok() ? GrammarText{.ebnf = schema.text() + "root ::= " + *root + "\n",
                                 .shortest_limit = schema.shortest_limit()}
                   : GrammarText{};
}

/// The grammar's text; empty where the input is refused.
GrammarText text_of(uint8_t kind, std::string_view input) {
  switch (kind) {
    case kSchema: {
      const auto json = Json::parse(input);
      return json.ok() ? schema_text(*json) : GrammarText{};
    }
    case kRegex: {
      const auto whole = nibble::check_regex(input, nibble::RegexPlace::kText);
      return {.ebnf = whole.ok() ? "root ::= " + whole->ebnf : std::string()};
    }
    case kPattern:
      return schema_text(Json::object({{"type", "string"}, {"pattern", input}}));
    default:
      return {.ebnf = nibble::check_ebnf(input).ok() ? std::string(input) : std::string()};
  }
}

struct Walk {
  std::vector<int32_t> tokens;
  std::string said;
  bool ended = false;
  bool stuck = false;  // nothing may come
};

/// Says `begin`, and then what may come by chance, up to the end or for some steps.
Walk walk(nibble::TokenConstraint& answer, std::vector<int32_t> begin, uint32_t state) {
  const nibble::Tokenizer& tokenizer = grammars().tokenizer();
  const int64_t vocabulary = tokenizer.vocab_size();
  std::vector<uint32_t> mask(static_cast<size_t>(nibble::mask_words(vocabulary)));
  Walk out;
  for (size_t step = 0; step < begin.size() + 64; ++step) {
    const bool some = answer.fill(mask);
    std::vector<int32_t> allowed;
    for (int32_t token = 0; token < vocabulary; ++token) {
      if (!some || nibble::mask_allows(mask, token)) {
        allowed.push_back(token);
      }
    }
    if (allowed.empty()) {  // a grammar that no text ends
      out.stuck = true;
      return out;
    }
    state = state * 1664525U + 1013904223U;
    const bool told = step < begin.size();
    check(!told || std::ranges::find(allowed, begin[step]) != allowed.end());
    out.ended = !told && some && nibble::mask_allows(mask, nibble::kEndOfBytes);
    const int32_t token = told ? begin[step] : allowed[(state >> 8) % allowed.size()];
    check(answer.accept(out.ended ? nibble::kEndOfBytes : token).ok());
    if (out.ended || (!told && !some)) {  // or it is free again
      out.ended = true;
      return out;
    }
    out.tokens.push_back(token);
    out.said += tokenizer.token_bytes(token);
  }
  return out;
}

/// Tools whose schemas are taken; none where the input is no array of tools.
CallRules tools_of(std::string_view input, JsonSchemaGrammar& schemas) {
  CallRules functions;
  const auto json = Json::parse(input);
  for (const Json& tool : json.ok() && json->is_array() ? json->as_array() : nibble::JsonArray()) {
    const Json* name = tool.find("name");
    const Json* parameters = tool.find("parameters");
    if (name == nullptr || !name->is_string() || name->as_string().empty() ||
        parameters == nullptr || functions.size() > 8) {
      continue;
    }
    auto rule = schemas.add(*parameters);
    functions.emplace_back(name->as_string(),
                           rule.ok() ? *rule : std::string(JsonSchemaGrammar::any_object()));
  }
  return functions;
}

/// A finished answer must parse; the names of tools of clients may be such that their calls do not.
void check_calls(const Walk& answer, ToolForm form, const CallRules& functions) {
  const bool harmony = form == ToolForm::kHarmony;
  nibble::AnswerStream stream(
      grammars().tokenizer(),
      {.parser = {.form = {harmony ? ReasoningForm::kHarmony : ReasoningForm::kNone, form},
                  .functions = {functions.front().first}}});
  for (const int32_t token : answer.tokens) {
    (void)stream.push(token);
  }
  for (const auto& piece : stream.finish()) {
    check(piece.kind != nibble::AnswerPiece::Kind::kArguments ||
          (Json::parse(piece.text).ok() && Json::parse(piece.text)->is_object()));
  }
}

void walk_tools(ToolForm form, std::string_view input, uint32_t state) {
  JsonSchemaGrammar schemas;
  const CallRules functions = tools_of(input, schemas);
  if (functions.empty()) {
    return;
  }
  const nibble::Tokenizer& tokenizer = grammars().tokenizer();
  const auto compile = [&](const std::string& rules) {
    return grammars().compiler().compile(
        {.ebnf = schemas.text() + rules, .shortest_limit = schemas.shortest_limit()});
  };
  const auto calls =
      nibble::call_grammar(tokenizer, form, functions, nibble::CallCount::kOneOrMore);
  check(calls.ok());
  if (const auto grammar = compile(*calls); grammar.ok()) {
    check_calls(walk(*(*grammar)->start(), {}, state), form, functions);
  }
  if (!nibble::marks_calls(form) || form == ToolForm::kHarmony) {
    return;
  }
  const auto tail = nibble::call_tail(tokenizer, form, functions);
  check(tail.ok());
  if (auto grammar = compile(tail->grammar); grammar.ok()) {
    const auto gate = nibble::gated_calls(
        tokenizer, std::make_shared<const nibble::CallMark>(tokenizer, tail->mark), grammar.value(),
        tail->next);
    check_calls(walk(*gate->start(), grammars().tokens("so " + tail->mark), state), form,
                functions);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool quiet = (nibble::set_log_level(nibble::LogLevel::kError), true);
  if (size == 0 || !quiet) {
    return 0;
  }
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const auto kind = static_cast<uint8_t>(data[0] % kKinds);
  const uint32_t state = data[size - 1] + 1U;
  if (kind == kTools) {
    walk_tools(kForms[data[0] / kKinds % std::size(kForms)], input, state);
    return 0;
  }
  const GrammarText text = text_of(kind, input);
  if (text.ebnf.empty()) {
    return 0;
  }
  const auto grammar = grammars().compiler().compile(text);
  if (!grammar.ok()) {
    return 0;
  }
  const Walk answer = walk(*(*grammar)->start(), {}, state);
  const bool json = kind == kSchema || kind == kPattern;
  check(!answer.ended || !json || Json::parse(answer.said).ok());
  check(!answer.stuck || !json || text.shortest_limit == 0);
  return 0;
}
