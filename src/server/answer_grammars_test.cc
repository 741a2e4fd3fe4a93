#include "server/answer_grammars.h"

#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class FormTest : public AppTest {
 protected:
  FormTest() { form_ = {ReasoningForm::kThink, ToolForm::kHermes}; }

  /// The content of a chat's answer.
  std::string content(const std::string& members) {
    const std::string answer = chat("x{\\\"12y", "\"max_tokens\":400," + members);
    const size_t at = answer.find("\"content\":\"");
    EXPECT_NE(at, std::string::npos) << answer;
    const size_t end = answer.find("\",\"refusal\"", at);
    return at == std::string::npos ? "" : answer.substr(at + 11, end - at - 11);
  }
};

TEST_F(FormTest, EveryFieldThatAsksForAForm) {
  const std::string schema = R"({"type":"integer","minimum":5,"maximum":7})";
  const std::string quoted = R"("{\"type\":\"integer\",\"minimum\":5,\"maximum\":7}")";
  for (const std::string& members :
       {R"("response_format":{"type":"json_schema","json_schema":{"name":"n","schema":)" + schema +
            "}}",
        R"("structured_outputs":{"json":)" + schema + "}", R"("guided_json":)" + quoted,
        R"("json_schema":)" + quoted, std::string(R"("regex":"[5-7]")"),
        std::string(R"("guided_regex":"^[5-7]$")"),
        std::string(R"("structured_outputs":{"choice":["5","6"],"regex":null})"),
        std::string(R"("ebnf":"root ::= [5-7]")"), std::string(R"("guided_choice":["7"])"),
        std::string(R"("guided_grammar":"root ::= \"6\"")")}) {
    EXPECT_THAT(content(members), ::testing::MatchesRegex("[567]")) << members;
  }
  EXPECT_THAT(content(R"("response_format":{"type":"json_object"})"), ::testing::StartsWith("{"));
  EXPECT_THAT(content(R"("response_format":{"type":"text"})"), ::testing::StartsWith("x{"));
  const std::string whole = chat("abc", R"("regex":"z{3}","max_tokens":9)");
  EXPECT_THAT(whole, HasSubstr(R"("content":"zzz")"));
  EXPECT_THAT(whole, HasSubstr(R"("finish_reason":"stop")"));
  EXPECT_THAT(call("POST", "/v1/completions", R"({"prompt":"abc","regex":"z{2}","n":2})"),
              HasSubstr(R"("text":"zz")"));
}

TEST_F(FormTest, AnswersWithoutAMarkOfThoughtObeyAtOnce) {
  const std::string answer = chat(R"(<think>abc</think>q)", R"("regex":"z{2}","max_tokens":40)");
  EXPECT_THAT(answer, HasSubstr(R"("content":"zz")"));  // no token <think> here: no thought either
}

TEST_F(FormTest, RefusalsNameTheFieldAndThePlace) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("response_format":{"type":"json_schema"})", R"("param":"response_format.json_schema")"},
      {R"("response_format":{"type":"json_schema","json_schema":{"schema":{"not":{}}}})",
       "response_format.json_schema.schema: #/not: this keyword is not enforced"},
      {R"("response_format":{"type":"structural_tag"})", R"("param":"response_format")"},
      {R"("structured_outputs":{"structural_tag":"x"})", R"("param":"structured_outputs")"},
      {R"("regex":"(")", "regex: byte 0 of the regular expression"},
      {R"("regex":1)", R"("param":"regex")"},
      {R"("ebnf":"root ::= x")", R"("param":"ebnf")"},
      {R"("json_schema":"{")", "json_schema: not valid JSON"},
      {R"("guided_choice":[])", R"("param":"guided_choice")"},
      {R"("regex":"a","ebnf":"b")", "regex asks for another form already"},
      {R"("regex":"a","bad_words":["a"])", R"("param":"bad_words")"},
      {R"("regex":"a","allowed_token_ids":[1])", R"("param":"allowed_token_ids")"},
      {R"("regex":"a","min_tokens":3)", R"("param":"min_tokens")"},
  };
  for (const auto& [members, part] : cases) {
    const std::string answer = chat("abc", members);
    EXPECT_THAT(answer, HasSubstr("400 Bad Request")) << members;
    EXPECT_THAT(answer, HasSubstr(part)) << members;
  }
}

TEST_F(FormTest, AnAnswerEndsWhereItsFormDoes) {
  const std::string answer = chat("abc", R"("regex":"zz","ignore_eos":true,"max_tokens":9)");
  EXPECT_THAT(answer, HasSubstr(R"("content":"zz")"));
  EXPECT_THAT(answer, HasSubstr("X-Nibble-Warning: ignored: ignore_eos\r\n"));
}

constexpr char kAdd[] =
    R"("tools":[{"type":"function","function":{"name":"add","parameters":{"type":"object",)"
    R"("properties":{"a":{"type":"integer","minimum":1,"maximum":3}},"required":["a"]}}},)"
    R"({"type":"function","function":{"name":"sub","strict":true,"parameters":{"type":"object",)"
    R"("properties":{},"additionalProperties":false}}}],"max_tokens":300)";

TEST_F(FormTest, RequiredAndNamedCalls) {
  const std::string tools = kAdd;
  EXPECT_THAT(chat("x", tools + R"(,"tool_choice":"required","parallel_tool_calls":false)"),
              HasSubstr(R"("finish_reason":"tool_calls")"));
  const std::string named =
      chat("x", tools + R"(,"tool_choice":{"type":"function","function":{"name":"add"}})");
  EXPECT_THAT(named, HasSubstr(R"("content":null)"));
  EXPECT_THAT(named, HasSubstr(R"("name":"add","arguments":"{)"));
  EXPECT_THAT(named, ::testing::ContainsRegex(R"(\\"a\\": ?[123])"));
  EXPECT_THAT(named, Not(HasSubstr("\"name\":\"sub\"")));
}

TEST_F(FormTest, CallsThatCannotBeRequired) {
  const std::string tools = kAdd;
  EXPECT_THAT(chat("x", R"("tool_choice":"required")"), HasSubstr(R"("param":"tool_choice")"));
  EXPECT_THAT(chat("x", tools + R"(,"tool_choice":{"type":"function","function":{"name":"mul"}})"),
              HasSubstr("no tool has the name"));
  EXPECT_THAT(chat("x", tools + R"(,"tool_choice":"required","regex":"a")"),
              HasSubstr(R"("param":"tool_choice")"));
  const std::string strict =
      R"("tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":)"
      R"({"not":{}}}}],"tool_choice":"required")";
  EXPECT_THAT(chat("x", strict), HasSubstr("tools[0].function.parameters: #/not: "));
}

constexpr char kStrict[] =
    R"("tools":[{"type":"function","function":{"name":"add","strict":true,"parameters":)"
    R"({"type":"object","properties":{"a":{"type":"integer","minimum":1,"maximum":3}},)"
    R"("required":["a"],"additionalProperties":false}}}],"max_tokens":300)";
// The fake says it as far as it may.
constexpr char kWrongCall[] =
    R"(Well.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 9}}\n</tool_call>$)";

TEST_F(FormTest, CallsOfStrictToolsObeyWhereTheModelMakesThem) {
  const std::string answer = chat(kWrongCall, kStrict);
  EXPECT_THAT(answer, HasSubstr(R"("content":"Well.")"));
  EXPECT_THAT(answer, ::testing::ContainsRegex(R"("arguments":"\{\\"a\\": ?[123]\}")"));
  EXPECT_THAT(answer, Not(HasSubstr("X-Nibble-Warning")));
  EXPECT_THAT(chat("abc$", kStrict), HasSubstr(R"("content":"abc")"));
  const std::string loose =
      std::string(kStrict).replace(std::string(kStrict).find("true"), 4, "false");
  EXPECT_THAT(chat(kWrongCall, loose), HasSubstr(R"({\"a\":9})"));
  EXPECT_EQ(engine_.last().constraint, nullptr);
  EXPECT_THAT(chat("x", std::string(kStrict) + R"(,"bad_words":["x"])"),
              HasSubstr(R"("param":"bad_words")"));
  const std::string unenforced =
      R"("tools":[{"type":"function","function":{"name":"f","strict":true,"parameters":)"
      R"({"not":{}}}}])";
  EXPECT_THAT(chat("x", unenforced), HasSubstr("tools[0].function.parameters: #/not: "));
  EXPECT_THAT(chat("x", unenforced + R"(,"tool_choice":"none","max_tokens":2)"),
              HasSubstr("200 OK"));
}

class UnmarkedCallsTest : public AppTest {
 protected:
  UnmarkedCallsTest() { form_ = {ReasoningForm::kNone, ToolForm::kLlama}; }
};

TEST_F(UnmarkedCallsTest, StrictToolsAreNamedInTheHeader) {
  EXPECT_THAT(chat("abc", kStrict),
              HasSubstr("X-Nibble-Warning: ignored: tools[].function.strict\r\n"));
  EXPECT_THAT(chat("abc", std::string(kStrict) + R"(,"tool_choice":"required")"),
              Not(HasSubstr("X-Nibble-Warning")));
  EXPECT_THAT(call("GET", "/metrics"), HasSubstr(R"(field="tools[].function.strict"} 1)"));
}

}  // namespace
}  // namespace nibble
