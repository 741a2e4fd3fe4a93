#include "text/grammar/grammar.h"

#include <random>

#include <gtest/gtest.h>

#include "text/answer/answer_stream.h"
#include "text/grammar/call_grammar.h"
#include "text/grammar/ebnf_check.h"
#include "text/grammar/regex_check.h"
#include "text/grammar/testing/byte_grammar.h"
#include "text/grammar/thought_budget.h"
#include "text/grammar/thought_gate.h"

namespace nibble {
namespace {

TEST(Grammar, EndsWhereTheGrammarDoes) {
  ByteGrammars grammars;
  const auto grammar = grammars.compiler().compile({.ebnf = "root ::= \"ab\" \"c\"?"});
  ASSERT_TRUE(grammar.ok()) << grammar.status().message();
  EXPECT_TRUE(grammars.allows(**grammar, "ab"));
  EXPECT_TRUE(grammars.allows(**grammar, "abc"));
  EXPECT_FALSE(grammars.allows(**grammar, "a"));
  EXPECT_FALSE(grammars.allows(**grammar, "abd"));
  const auto answer = (*grammar)->start();
  std::vector<uint32_t> mask(static_cast<size_t>(mask_words(257)));
  ASSERT_TRUE(answer->fill(mask));
  for (int32_t token = 0; token < 257; ++token) {
    EXPECT_EQ(mask_allows(mask, token), token == 'a') << token;
  }
  EXPECT_FALSE(answer->accept('b').ok());
  for (const char c : {'a', 'b', 'c'}) {
    ASSERT_TRUE(answer->accept(c).ok());
  }
  ASSERT_TRUE(answer->fill(mask));
  for (int32_t token = 0; token < 257; ++token) {
    EXPECT_EQ(mask_allows(mask, token), token == kEndOfBytes) << token;
  }
}

TEST(Grammar, RefusesNonsenseAndKeepsTheLatest) {
  const auto tokenizer = byte_tokens();
  GrammarCompiler compiler(*tokenizer, 300, std::array<int64_t, 1>{kEndOfBytes},
                           {.cache_count = 2});
  EXPECT_FALSE(compiler.compile({.ebnf = "root ::= nothing"}).ok());
  EXPECT_FALSE(compiler.compile({.ebnf = "no rules"}).ok());
  EXPECT_EQ(compiler.cache_size().count, 0U);
  const auto first = compiler.compile({.ebnf = "root ::= \"a\""});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(*compiler.compile({.ebnf = "root ::= \"a\""}), *first);
  ASSERT_TRUE(compiler.compile({.ebnf = "root ::= \"b\""}).ok());
  ASSERT_TRUE(compiler.compile({.ebnf = "root ::= \"c\""}).ok());
  EXPECT_EQ(compiler.cache_size().count, 2U);
  EXPECT_NE(*compiler.compile({.ebnf = "root ::= \"a\""}), *first);
}

TEST(Grammar, SpecialTokensComeOnlyWhereTheyAreNamed) {
  ByteGrammars grammars({"<mark>"});
  const auto grammar = grammars.compiler().compile({.ebnf = "root ::= [^x]* Token(257) [^\\x00]*"});
  ASSERT_TRUE(grammar.ok()) << grammar.status().message();
  EXPECT_TRUE(grammars.allows(**grammar, "ab<mark>"));
  EXPECT_TRUE(grammars.allows(**grammar, "<mark>x"));
  EXPECT_FALSE(grammars.allows(**grammar, "<mark><mark>"));
  EXPECT_FALSE(grammars.allows(**grammar, "abc"));
}

TEST(Grammar, TokensOfSeveralCharactersKeepLimits) {
  ByteGrammars grammars({}, {"\"abc", "abc", "\",\"ab", "a\\", "n\"", "\\u0041", "bc\""});
  const auto schema =
      grammars.schema(R"({"type":"array","items":{"type":"string","maxLength":2}})");
  ASSERT_TRUE(schema.ok()) << schema.status().message();
  const auto id = [&](const char* text) { return *grammars.tokenizer().token_to_id(text); };
  EXPECT_FALSE(grammars.allows(**schema, {'[', id("\"abc"), '"', ']'}));
  EXPECT_FALSE(grammars.allows(**schema, {'[', '"', id("abc"), '"', ']'}));
  EXPECT_FALSE(grammars.allows(**schema, {'[', '"', 'x', id("bc\""), ']'}));
  EXPECT_TRUE(grammars.allows(**schema, {'[', '"', id("bc\""), ']'}));
  EXPECT_TRUE(grammars.allows(**schema, {'[', '"', id("a\\"), id("n\""), ']'}));
  EXPECT_FALSE(grammars.allows(**schema, {'[', '"', 'x', id("a\\"), id("n\""), ']'}));
  EXPECT_TRUE(grammars.allows(**schema, {'[', '"', 'x', id("\\u0041"), id("\",\"ab"), '"', ']'}));
}

TEST(Regex, TakesWhatItEnforces) {
  ByteGrammars grammars;
  const auto allows = [&](std::string_view pattern, std::string_view text) {
    const auto whole = check_regex(pattern, RegexPlace::kText);
    EXPECT_TRUE(whole.ok()) << whole.status().message();
    const auto grammar = grammars.compiler().compile({.ebnf = "root ::= " + whole->ebnf});
    EXPECT_TRUE(grammar.ok()) << grammar.status().message();
    return grammars.allows(**grammar, text);
  };
  EXPECT_TRUE(allows("^(?:a|b){2,3}?$", "aba"));
  EXPECT_FALSE(allows("(a|b){2,3}", "abab"));
  EXPECT_TRUE(allows(R"(\w+\.\d\-[\w.]+\x41)", "a_Z.1-x.yA"));
  EXPECT_TRUE(allows(R"((?<year>\d{4})/é+\u00e9)", "2024/éé"));
  EXPECT_FALSE(allows(R"(\D)", "7"));
  EXPECT_FALSE(allows("a.b", "a\nb"));
  EXPECT_TRUE(allows(R"([^\d\s]"\\)", "x\"\\"));
  EXPECT_FALSE(allows(R"([^\d\s])", "é"));
  EXPECT_FALSE(allows("x(ab*)?y", "xby"));
  EXPECT_TRUE(allows("x(ab*|c)?y", "xy"));
  EXPECT_FALSE(allows(R"(x(\(a*\))?y)", "xa)y"));
}

TEST(Regex, RefusesTheRestWithItsPlace) {
  const std::pair<const char*, const char*> cases[] = {
      {"(?=a)", "byte 1 "},  {"(?i)a", "byte 1 "},        {"a\\b", "byte 1 "},
      {"(a)\\1", "byte 3 "}, {"(a", "byte 0 "},           {"a)", "byte 1 "},
      {"[a", "byte 0 "},     {"a$b", "byte 1 "},          {"*a", "byte 0 "},
      {"a**", "byte 2 "},    {"a{3,2}", "byte 5 "},       {"a{99999}", "byte 8 "},
      {"[]a]", "byte 1 "},   {"[z-a]", "byte 4 "},        {"\\p{L}", "byte 0 "},
      {"a\\", "byte 1 "},    {"(a{20}){20}", "byte 11 "}, {"((.|a){9}b){15}", "byte 15 "},
      {".{1001}", "byte 7 "}};
  for (const auto& [pattern, place] : cases) {
    const auto checked = check_regex(pattern, RegexPlace::kText);
    ASSERT_FALSE(checked.ok()) << pattern;
    EXPECT_EQ(checked.status().message().substr(0, std::string_view(place).size()), place)
        << pattern << ": " << checked.status().message();
  }
  EXPECT_FALSE(check_regex(std::string(9000, 'a'), RegexPlace::kText).ok());
}

// What takes long to prepare, or makes masks that do: many parts in a row that may be left out.
TEST(Regex, BoundsWhatMayBeLeftOut) {
  const auto times = [](std::string_view part, int count) {
    std::string out;
    for (int i = 0; i < count; ++i) {
      out += part;
    }
    return out;
  };
  const auto taken = [](const std::string& pattern) {
    return check_regex(pattern, RegexPlace::kText).ok();
  };
  for (const char* part : {"a?", "a*", "(a|aa)*", "[a-z]?", "(ab)?", "a{0,2}", "(|a)", "(a?b*)"}) {
    EXPECT_TRUE(taken(times(part, 10))) << part;
    EXPECT_FALSE(taken(times(part, 200))) << part;
    EXPECT_TRUE(taken(times(std::string(part) + "x", 200))) << part;
  }
  EXPECT_TRUE(taken(times(".?", 8)));
  EXPECT_FALSE(taken(times(".?", 20)));
  EXPECT_FALSE(taken("(a?){120}"));
  EXPECT_TRUE(taken("(ab){0,100}"));
  EXPECT_TRUE(taken("[a-z]{0,200}"));
  const auto check = [](const std::string& rules) { return check_ebnf(rules).ok(); };
  EXPECT_TRUE(check("root ::= " + times("\"a\"? ", 10)));
  EXPECT_FALSE(check("root ::= " + times("\"a\"? ", 200)));
  EXPECT_FALSE(check("root ::= " + times("x ", 200) + "\nx ::= \"a\"?"));
  EXPECT_TRUE(check("root ::= " + times("x \",\" ", 200) + "\nx ::= \"a\"?"));
  EXPECT_TRUE(check("root ::= x" + times(" | x", 200) + "\nx ::= \"a\"?"));
}

TEST(Grammar, ThatAllowsNothingIsRefused) {
  ByteGrammars grammars;
  for (const char* rules : {"root ::= root", "root ::= a\na ::= b\nb ::= a"}) {
    const auto made = grammars.compiler().compile({.ebnf = rules});
    ASSERT_FALSE(made.ok()) << rules;
    EXPECT_EQ(made.status().message(), "the grammar allows no text at all");
  }
  EXPECT_TRUE(grammars.compiler().compile({.ebnf = "root ::= \"\""}).ok());
}

TEST(Ebnf, BoundsWhatClientsAskFor) {
  EXPECT_TRUE(check_ebnf("root ::= \"{9999}(\" [{}] ([a-z]{1,20} \" \"){3} # x(").ok());
  EXPECT_FALSE(check_ebnf("root ::= \"a\"{1001}").ok());
  EXPECT_FALSE(check_ebnf("root ::= (\"a\"{100}){100}").ok());
  std::string classes = "root ::=";
  for (int i = 0; i < 900; ++i) {
    classes += " [a-z]";
  }
  EXPECT_TRUE(check_ebnf(classes).ok());
  EXPECT_FALSE(check_ebnf(classes + classes.substr(8)).ok());
  EXPECT_FALSE(check_ebnf("root ::= ([a-z] [0-9]){600}").ok());
  EXPECT_FALSE(check_ebnf("root ::= Token(3)").ok());
  EXPECT_FALSE(check_ebnf("root[temperature=3] ::= \"a\"").ok());
  EXPECT_FALSE(check_ebnf(std::string(70000, ' ')).ok());
}

TEST(ThoughtGate, HoldsFromTheEndOfAThought) {
  ByteGrammars grammars({"<think>", "</think>"});
  const auto grammar = grammars.compiler().compile({.ebnf = "root ::= \"yes\""});
  ASSERT_TRUE(grammar.ok());
  const auto follows = [&](ThoughtStart start, std::string_view text) {
    const auto gate =
        after_thought(grammars.tokenizer(), ReasoningForm::kThink, start, (*grammar)->start());
    return grammars.follows(*gate, grammars.tokens(text));
  };
  EXPECT_TRUE(follows(ThoughtStart::kMayThink, "yes"));
  EXPECT_TRUE(follows(ThoughtStart::kMayThink, "<think>no\n</think>yes"));
  EXPECT_TRUE(follows(ThoughtStart::kThinking, "no</think>yes"));
  EXPECT_FALSE(follows(ThoughtStart::kMayThink, "no"));
  EXPECT_FALSE(follows(ThoughtStart::kMayThink, "<think>no</think>no"));
  EXPECT_FALSE(follows(ThoughtStart::kThinking, "no</think>no"));
}

TEST(ThoughtBudget, EndsAThoughtThatIsTooLong) {
  ByteGrammars with_specials({"<think>", "</think>"});
  ByteGrammars without_specials;  // there the marks have several tokens
  const auto follows = [](ByteGrammars& of, ThoughtStart start, std::string_view text) {
    auto limited = limited_thought(
        {of.tokenizer(), thought_marks(ReasoningForm::kThink).value(), 3}, start, nullptr);
    CHECK(limited.ok());
    return of.follows(**limited, of.tokens(text));
  };
  for (ByteGrammars* of : {&without_specials, &with_specials}) {
    EXPECT_TRUE(follows(*of, ThoughtStart::kMayThink, "no thought at all"));
    EXPECT_TRUE(follows(*of, ThoughtStart::kMayThink, "<think>abc</think>as long as it likes"));
    EXPECT_TRUE(follows(*of, ThoughtStart::kThinking, "abc</think>as long as it likes"));
    EXPECT_FALSE(follows(*of, ThoughtStart::kMayThink, "<think>abcd</think>"));
    EXPECT_FALSE(follows(*of, ThoughtStart::kThinking, "abcd</think>"));
  }
  EXPECT_TRUE(follows(with_specials, ThoughtStart::kMayThink, "<think>a</think>and more"));
  EXPECT_FALSE(thought_marks(ReasoningForm::kHarmony));
}

TEST(ThoughtBudget, LeavesTheRestToAGrammar) {
  ByteGrammars grammars({"<think>", "</think>"});
  const auto grammar = grammars.compiler().compile({.ebnf = "root ::= \"yes\""});
  ASSERT_TRUE(grammar.ok());
  const auto follows = [&](std::string_view text) {
    const Tokenizer& tokenizer = grammars.tokenizer();
    auto gate = after_thought(tokenizer, ReasoningForm::kThink, ThoughtStart::kMayThink,
                              (*grammar)->start());
    auto limited = limited_thought({tokenizer, thought_marks(ReasoningForm::kThink).value(), 2},
                                   ThoughtStart::kMayThink, std::move(gate));
    CHECK(limited.ok());
    return grammars.follows(**limited, grammars.tokens(text));
  };
  EXPECT_TRUE(follows("yes"));
  EXPECT_TRUE(follows("<think>ab</think>yes"));
  EXPECT_FALSE(follows("<think>abc</think>yes"));
  EXPECT_FALSE(follows("<think>ab</think>no"));
}

// The answers that a grammar of calls allows, by chance, are calls to the parser of the same form.
TEST(CallGrammar, WritesWhatTheParserReads) {
  ByteGrammars grammars({"<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                         "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                         "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
                         "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "[TOOL_CALLS]", "<|channel|>",
                         "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"});
  std::mt19937 random(5);
  for (const ToolForm form : {ToolForm::kHermes, ToolForm::kLlama, ToolForm::kMistral,
                              ToolForm::kKimi, ToolForm::kDeepSeek, ToolForm::kHarmony}) {
    JsonSchemaGrammar schema;
    const auto arguments = Json::parse(
        R"({"type":"object","properties":{"x":{"type":"integer","minimum":0,"maximum":99}},)"
        R"("required":["x"]})");
    const auto rule = schema.add(*arguments);
    ASSERT_TRUE(rule.ok());
    const auto calls = call_grammar(grammars.tokenizer(), form, {{"add", *rule}, {"get_it", *rule}},
                                    CallCount::kOneOrMore);
    ASSERT_TRUE(calls.ok()) << calls.status().message();
    const auto grammar = grammars.compiler().compile({.ebnf = schema.text() + *calls});
    ASSERT_TRUE(grammar.ok()) << grammar.status().message() << "\n" << *calls;
    for (int run = 0; run < 20; ++run) {
      const auto answer = (*grammar)->start();
      AnswerStream stream(grammars.tokenizer(),
                          {.parser = {.form = {form == ToolForm::kHarmony ? ReasoningForm::kHarmony
                                                                          : ReasoningForm::kNone,
                                               form},
                                      .functions = {"add", "get_it"}}});
      std::vector<AnswerPiece> pieces;
      const auto take = [&](std::vector<AnswerPiece> more) {
        pieces.insert(pieces.end(), more.begin(), more.end());
      };
      std::vector<uint32_t> mask(
          static_cast<size_t>(mask_words(grammars.tokenizer().vocab_size())));
      for (int step = 0; step < 2000; ++step) {
        ASSERT_TRUE(answer->fill(mask));
        std::vector<int32_t> allowed;
        for (int32_t token = 0; token < grammars.tokenizer().vocab_size(); ++token) {
          if (mask_allows(mask, token)) {
            allowed.push_back(token);
          }
        }
        ASSERT_FALSE(allowed.empty());
        const bool ends = mask_allows(mask, kEndOfBytes);
        const int32_t token = ends ? kEndOfBytes : allowed[random() % allowed.size()];
        ASSERT_TRUE(answer->accept(token).ok());
        if (ends) {
          break;
        }
        take(stream.push(token));
      }
      take(stream.finish());
      int64_t begun = 0;
      for (const AnswerPiece& piece : pieces) {
        EXPECT_NE(piece.kind, AnswerPiece::Kind::kContent) << tool_form_name(form) << piece.text;
        begun += piece.kind == AnswerPiece::Kind::kCallBegin ? 1 : 0;
      }
      EXPECT_GE(begun, 1) << tool_form_name(form);
    }
  }
}

}  // namespace
}  // namespace nibble
