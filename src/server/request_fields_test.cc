#include <string>
#include <vector>

#include "server/continued_message.h"
#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::vector<int32_t> bytes(std::string_view text) { return {text.begin(), text.end()}; }

class RequestFieldsTest : public AppTest {
 protected:
  std::string complete(const std::string& members) {
    return call("POST", "/v1/completions", R"({"prompt":"abcdef",)" + members + "}");
  }
  void expect_refused(const std::string& members, const std::string& param) {
    EXPECT_THAT(complete(members), HasSubstr(R"("param":")" + param + "\""));
  }
};

TEST_F(RequestFieldsTest, BadWordsReachTheEngineWithAndWithoutABlank) {
  EXPECT_THAT(complete(R"("bad_words":["hi"," x","x"],"max_tokens":1)"), HasSubstr("200 OK"));
  const std::vector<std::vector<int32_t>> expected = {bytes("hi"), bytes(" hi"), bytes("x"),
                                                      bytes(" x")};
  EXPECT_EQ(engine_.last().bad_words, expected);
  for (const char* bad : {R"("hi")", "[1]", R"(["a",""])", R"(["  "])"}) {
    expect_refused(std::string(R"("bad_words":)") + bad, "bad_words");
  }
}

TEST_F(RequestFieldsTest, WhatTheEngineIsToldReachesIt) {
  EXPECT_THAT(complete(R"("allowed_token_ids":[7,256],"cache_salt":"s","priority":-3)"),
              HasSubstr("200 OK"));
  EXPECT_EQ(engine_.last().sampling.allowed_tokens, (std::vector<int32_t>{7, 256}));
  EXPECT_EQ(engine_.last().cache_salt, "s");
  EXPECT_EQ(engine_.last().priority, -3);
  expect_refused(R"("allowed_token_ids":[257])", "allowed_token_ids");
  expect_refused(R"("allowed_token_ids":[])", "allowed_token_ids");
  expect_refused(R"("cache_salt":"")", "cache_salt");
  expect_refused(R"("cache_salt":")" + std::string(1025, 's') + "\"", "cache_salt");
  expect_refused(R"("priority":1.5)", "priority");
  EXPECT_THAT(complete(R"("stop":"c","no_stop_trim":true)"), HasSubstr(R"("text":"abc")"));
}

TEST_F(RequestFieldsTest, PromptsAreTruncatedInFront) {
  EXPECT_THAT(complete(R"("truncate_prompt_tokens":2,"max_tokens":1)"),
              HasSubstr(R"("prompt_tokens":2,)"));
  EXPECT_EQ(engine_.last().prompt, bytes("ef"));
  complete(R"("truncate_prompt_tokens":100,"max_tokens":1)");
  EXPECT_EQ(engine_.last().prompt, bytes("abcdef"));
  complete(R"("truncate_prompt_tokens":-1,"max_tokens":997)");  // of 1000
  EXPECT_EQ(engine_.last().prompt, bytes("def"));
  expect_refused(R"("max_tokens":997)", "max_tokens");
  expect_refused(R"("truncate_prompt_tokens":0)", "truncate_prompt_tokens");
  expect_refused(R"("truncate_prompt_tokens":-2)", "truncate_prompt_tokens");
}

TEST_F(RequestFieldsTest, TokenIdsComeWithWholeAnswersAndStreams) {
  EXPECT_THAT(complete(R"("return_token_ids":true,"max_tokens":2)"),
              HasSubstr(R"("token_ids":[97,98],"prompt_token_ids":[97,98,99,100,101,102]}],)"));
  EXPECT_THAT(chat("a$", R"("return_token_ids":true)"),
              HasSubstr(R"("token_ids":[97,256]}],"prompt_token_ids":[97,36])"));
  EXPECT_THAT(complete(R"("max_tokens":2)"), Not(HasSubstr("token_ids")));
  const std::string stream =
      complete(R"("return_token_ids":true,"max_tokens":4,"stream":true,"stop":"cx")");
  size_t at = 0;
  for (const char* part :
       {R"("text":"a",)", R"("token_ids":[97],"prompt_token_ids":[97,98,99,100,101,102]}])",
        R"("text":"b",)", R"("token_ids":[98]}])", R"("text":"cd",)", R"("token_ids":[99,100]}])",
        R"("finish_reason":"length")", R"("token_ids":[]}])"}) {
    at = stream.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << " in\n" << stream;
  }
  EXPECT_THAT(chat("a", R"("return_token_ids":true,"max_tokens":1,"stream":true)"),
              HasSubstr(R"("token_ids":[]}],"prompt_token_ids":[97]})"));
}

TEST_F(RequestFieldsTest, FieldsWithoutEffectAreNamedInAHeaderAndCounted) {
  const std::string members = R"("user":"me","store":true,"metadata":{},"wibble":1,"max_tokens":1)";
  EXPECT_THAT(complete(members), HasSubstr("X-Nibble-Warning: ignored: user, store; 1 unknown "
                                           "field\r\n"));
  EXPECT_THAT(complete(members + R"(,"stream":true)"),
              HasSubstr("X-Nibble-Warning: ignored: user, store; 1 unknown field\r\n"));
  EXPECT_THAT(complete(R"("store":false,"service_tier":"auto","max_tokens":1)"),
              Not(HasSubstr("X-Nibble-Warning")));
  EXPECT_THAT(complete(R"("a":1,"b":1,"max_tokens":1)"),
              HasSubstr("ignored: 2 unknown fields\r\n"));
  const std::string metrics = call("GET", "/metrics");
  EXPECT_THAT(metrics, HasSubstr(R"(field="user"} 2)"));
  EXPECT_THAT(metrics, HasSubstr("field=\"(unknown)\"} 4"));
  EXPECT_THAT(metrics, Not(HasSubstr("wibble")));
  EXPECT_THAT(chat("a", R"("modalities":["text","audio"])"), HasSubstr(R"("param":"modalities")"));
  EXPECT_THAT(chat("a", R"("modalities":["text"],"max_tokens":1)"), HasSubstr("200 OK"));
  const ParsedRequest strict = parse_completion_request(R"({"prompt":"a","user":"me"})",
                                                        {.strictness = Strictness::kStrict});
  ASSERT_TRUE(std::holds_alternative<ApiError>(strict));
  EXPECT_EQ(std::get<ApiError>(strict).param, "user");
}

constexpr char kTurns[] = R"("messages":[{"role":"user","content":"hi"},)"
                          R"({"role":"assistant","content":" Sure "}],)";

TEST_F(RequestFieldsTest, ContinuingExcludesAGenerationPrompt) {
  const auto ask = [&](const std::string& members) {
    return call("POST", "/v1/chat/completions",
                "{" + std::string(kTurns) + R"("max_tokens":1,"continue_final_message":true)" +
                    members + "}");
  };
  EXPECT_THAT(ask(""), HasSubstr("200 OK"));
  EXPECT_EQ(engine_.last().prompt, bytes("hi Sure "));
  EXPECT_THAT(ask(R"(,"add_generation_prompt":false)"), HasSubstr("200 OK"));
  EXPECT_THAT(ask(R"(,"add_generation_prompt":true)"),
              HasSubstr(R"("param":"continue_final_message")"));
}

TEST(ContinuedMessage, EndsWithTheLastMessagesText) {
  const Json messages = *Json::parse("{" + std::string(kTurns) + R"("x":1})")->find("messages");
  const auto rendered = [&](const char* source) {
    return render_continued(fake_text(source), {.messages = &messages});
  };
  EXPECT_EQ(*rendered("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
                      "{% if add_generation_prompt %}<assistant>{% endif %}"),
            "<user>hi</s><assistant> Sure ");
  EXPECT_EQ(*rendered("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>"
                      "{% endfor %}"),
            "<user>hi</s><assistant>Sure");
  const auto hidden = rendered("{{ messages[0].content }}");
  ASSERT_FALSE(hidden.ok());
  EXPECT_THAT(hidden.status().message(), HasSubstr("continue_final_message"));
}

}  // namespace
}  // namespace nibble
