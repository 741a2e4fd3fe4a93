#include "text/grammar/call_gate.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/json.h"
#include "text/answer/answer_stream.h"
#include "text/grammar/testing/byte_grammar.h"

namespace nibble {
namespace {

constexpr char kSchema[] =
    R"({"type":"object","properties":{"x":{"type":"integer","minimum":10,"maximum":99}},)"
    R"("required":["x"]})";

/// Hermes' marks are tokens here, too.
std::vector<std::string> all_marks() {
  std::vector<std::string> marks = call_marks();
  marks.insert(marks.end(), {"<tool_call>", "</tool_call>"});
  return marks;
}

/// Answers whose calls of "add" have the schema's arguments.
std::shared_ptr<const Grammar> gate_of(ByteGrammars& grammars, ToolForm form) {
  JsonSchemaGrammar schema;
  const auto rule = schema.add(*Json::parse(kSchema));
  CHECK(rule.ok());
  if (form == ToolForm::kHarmony) {
    auto arguments =
        grammars.compiler().compile({.ebnf = schema.text() + "root ::= " + *rule + "\n"});
    CHECK(arguments.ok());
    return gated_harmony_calls(grammars.tokenizer(), {{"add", arguments.value()}});
  }
  const std::string any(JsonSchemaGrammar::any_object());
  const auto tail = call_tail(grammars.tokenizer(), form, {{"add", *rule}, {"any", any}});
  CHECK(tail.ok());
  auto calls = grammars.compiler().compile({.ebnf = schema.text() + tail->grammar});
  CHECK(calls.ok());
  return gated_calls(grammars.tokenizer(),
                     std::make_shared<const CallMark>(grammars.tokenizer(), tail->mark),
                     calls.value(), tail->next);
}

struct Case {
  ToolForm form;
  std::string begin;   // of a call, after what is said
  std::string middle;  // up to the arguments
  std::string end;
};
const Case kCases[] = {
    {ToolForm::kHermes, "<tool_call>", "\n{\"name\": \"NAME\", \"arguments\": ", "}\n</tool_call>"},
    {ToolForm::kKimi, "<|tool_calls_section_begin|><|tool_call_begin|>",
     "functions.NAME:0<|tool_call_argument_begin|>", "<|tool_call_end|>"},
    {ToolForm::kDeepSeek, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "NAME<｜tool▁sep｜>",
     "<｜tool▁call▁end｜>"},
    {ToolForm::kMistral, "[TOOL_CALLS]", "NAME[ARGS]", ""},
    {ToolForm::kHarmony, "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "",
     ""},
};

std::string call_of(const Case& form, std::string_view name, std::string_view arguments) {
  std::string text = form.begin + form.middle;
  text.replace(text.find("NAME"), 4, name);
  return text + std::string(arguments) + form.end;
}

class CallGateTest : public ::testing::Test {
 protected:
  static bool follows(ByteGrammars& grammars, ToolForm form, std::string_view text) {
    const auto answer = gate_of(grammars, form)->start();
    return grammars.follows(*answer, grammars.tokens(text));
  }
};

TEST_F(CallGateTest, HoldsCallsAndNothingElse) {
  ByteGrammars grammars(all_marks());
  for (const Case& each : kCases) {
    SCOPED_TRACE(tool_form_name(each.form));
    const bool harmony = each.form == ToolForm::kHarmony;
    const std::string said = harmony
                                 ? "<|channel|>analysis<|message|>add {\"x\": 7}<|end|><|start|>"
                                   "assistant"
                                 : "I say {\"x\": 7}, add. ";
    EXPECT_TRUE(follows(grammars, each.form, said));
    EXPECT_TRUE(follows(grammars, each.form, said + call_of(each, "add", "{\"x\": 77}")));
    EXPECT_FALSE(follows(grammars, each.form, said + call_of(each, "add", "{\"x\": 7}")));
    EXPECT_FALSE(follows(grammars, each.form, said + call_of(each, "add", "{}")));
    EXPECT_TRUE(follows(grammars, each.form, said + call_of(each, "any", "{}")));
    EXPECT_EQ(follows(grammars, each.form, said + call_of(each, "other", "{}")), harmony);
    const std::string two = call_of(each, "add", "{\"x\": 77}") + call_of(each, "add", "{}");
    EXPECT_FALSE(follows(grammars, each.form, two));
  }
  EXPECT_TRUE(follows(grammars, ToolForm::kHermes,
                      call_of(kCases[0], "add", "{\"x\": 10}") + " and " +
                          call_of(kCases[0], "add", "{\"x\": 99}") + " done"));
}

TEST_F(CallGateTest, AListOfCallsEndsTheAnswer) {
  ByteGrammars grammars({"[TOOL_CALLS]"});
  const std::string one = R"({"name": "add", "arguments": {"x": 77}})";
  const std::string wrong = R"({"name": "add", "arguments": {"x": 7}})";
  EXPECT_TRUE(
      follows(grammars, ToolForm::kMistral, "Well [TOOL_CALLS] [" + one + ", " + one + "]"));
  EXPECT_FALSE(follows(grammars, ToolForm::kMistral, "[TOOL_CALLS][" + one + ", " + wrong + "]"));
  EXPECT_FALSE(follows(grammars, ToolForm::kMistral, "[TOOL_CALLS][" + one + "] so"));
}

// Where a mark is text, no token may hold its end and more.
TEST_F(CallGateTest, MarksOfTextEndWithAToken) {
  ByteGrammars grammars({},
                        {"l>\n", ">{", "<tool_call>{", "x<tool_call>", "call>", "<<tool_call>!"});
  const std::string right = call_of(kCases[0], "add", "{\"x\": 77}");
  EXPECT_TRUE(follows(grammars, ToolForm::kHermes, "a > b <tool " + right));
  const auto first = kEndOfBytes + 1;
  const auto tokens = [&](std::string_view before, std::initializer_list<int32_t> words) {
    std::vector<int32_t> out;
    for (const char byte : before) {
      out.push_back(static_cast<unsigned char>(byte));
    }
    out.insert(out.end(), words);
    return out;
  };
  const auto grammar = gate_of(grammars, ToolForm::kHermes);
  const auto allows = [&](const std::vector<int32_t>& answer) {
    return grammars.follows(*grammar->start(), answer);
  };
  EXPECT_TRUE(allows(tokens("al", {first})));          // l>\n elsewhere
  EXPECT_FALSE(allows(tokens("<tool_cal", {first})));  // ends the mark
  EXPECT_FALSE(allows(tokens("<tool_call", {first + 1})));
  EXPECT_TRUE(allows(tokens("<tool_cal", {first + 1})));
  EXPECT_FALSE(allows(tokens("", {first + 2})));
  EXPECT_FALSE(allows(tokens("", {first + 5})));
  EXPECT_FALSE(allows(tokens("", {first + 3})));  // a call has begun and is not over
  auto begun = tokens("", {first + 3});
  const auto rest = grammars.tokens(right.substr(kCases[0].begin.size()));
  begun.insert(begun.end(), rest.begin(), rest.end());
  EXPECT_TRUE(allows(begun));
  begun = tokens("<tool_", {first + 4});
  begun.insert(begun.end(), rest.begin(), rest.end());
  EXPECT_TRUE(allows(begun));
}

/// Says `begin`, which has to be allowed, and then what may come by chance until it is free to end.
std::vector<int32_t> by_chance(ByteGrammars& grammars,
                               GrammarState& answer,
                               const std::string& begin,
                               std::mt19937& random) {
  std::vector<int32_t> tokens = grammars.tokens(begin);
  const int32_t vocabulary = grammars.tokenizer().vocab_size();
  std::vector<uint32_t> mask(static_cast<size_t>(mask_words(vocabulary)));
  for (const int32_t token : tokens) {
    EXPECT_TRUE(!answer.fill(mask) || mask_allows(mask, token));
    EXPECT_TRUE(answer.accept(token).ok());
  }
  while (answer.fill(mask) && !mask_allows(mask, kEndOfBytes)) {
    std::vector<int32_t> allowed;
    for (int32_t token = 0; token < vocabulary; ++token) {
      if (mask_allows(mask, token)) {
        allowed.push_back(token);
      }
    }
    CHECK(!allowed.empty());
    tokens.push_back(allowed[random() % allowed.size()]);
    EXPECT_TRUE(answer.accept(tokens.back()).ok());
  }
  return tokens;
}

/// Calls that the parser finds, where there is nothing else.
int64_t calls_in(const Tokenizer& tokenizer, const std::vector<int32_t>& tokens, ToolForm form) {
  const ReasoningForm reasoning =
      form == ToolForm::kHarmony ? ReasoningForm::kHarmony : ReasoningForm::kNone;
  AnswerStream stream(tokenizer,
                      {.parser = {.form = {reasoning, form}, .functions = {"add", "any"}}});
  int64_t begun = 0;
  const auto count = [&](const std::vector<AnswerPiece>& pieces) {
    for (const AnswerPiece& piece : pieces) {
      EXPECT_NE(piece.kind, AnswerPiece::Kind::kContent) << piece.text;
      begun += piece.kind == AnswerPiece::Kind::kCallBegin ? 1 : 0;
    }
  };
  for (const int32_t token : tokens) {
    count(stream.push(token));
  }
  count(stream.finish());
  return begun;
}

// What comes by chance behind a mark is a call to the parser of the same form.
TEST_F(CallGateTest, CallsByChanceAreReadAsCalls) {
  ByteGrammars with(all_marks()), without;
  std::mt19937 random(7);
  const auto check = [&](ByteGrammars& grammars, const Case& each) {
    SCOPED_TRACE(tool_form_name(each.form));
    std::string begin = each.begin;
    if (each.form == ToolForm::kHarmony) {
      begin.replace(begin.find("NAME"), 4, "add");
    }
    const auto answer = gate_of(grammars, each.form)->start();
    const std::vector<int32_t> tokens = by_chance(grammars, *answer, begin, random);
    EXPECT_TRUE(answer->complete());
    EXPECT_GE(calls_in(grammars.tokenizer(), tokens, each.form), 1);
  };
  for (const Case& each : kCases) {
    check(with, each);
  }
  check(without, kCases[0]);  // its marks are text
}

TEST_F(CallGateTest, FormsWithoutAMark) {
  EXPECT_FALSE(marks_calls(ToolForm::kNone) || marks_calls(ToolForm::kLlama));
  ByteGrammars grammars;
  EXPECT_EQ(
      call_tail(grammars.tokenizer(), ToolForm::kLlama, {{"f", "json_object"}}).status().code(),
      StatusCode::kUnsupported);
}

}  // namespace
}  // namespace nibble
