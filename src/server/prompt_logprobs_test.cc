#include <string>

#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class PromptLogprobsTest : public AppTest {
 protected:
  std::string complete(const std::string& members) {
    return call("POST", "/v1/completions", "{" + members + "}");
  }
};

TEST_F(PromptLogprobsTest, EchoGivesThoseOfThePromptAndTheAnswer) {
  const std::string answer = complete(R"("prompt":"abc","max_tokens":1,"echo":true,"logprobs":1)");
  EXPECT_THAT(answer, HasSubstr(R"("text":"abca")"));
  EXPECT_THAT(answer, HasSubstr(R"("tokens":["a","b","c","a"])"));
  EXPECT_THAT(answer, HasSubstr(R"("token_logprobs":[null,-0.25,-0.5,-0.5])"));
  EXPECT_THAT(answer, HasSubstr(R"("top_logprobs":[null,{"c":-0.125},{"d":-0.375},{"a":-0.5}])"));
  EXPECT_THAT(answer, HasSubstr(R"("text_offset":[0,1,2,3])"));
}

TEST_F(PromptLogprobsTest, AnEndTokenIsOneOfTheAnswers) {
  const std::string answer = complete(R"("prompt":"$b","max_tokens":1,"echo":true,"logprobs":0)");
  EXPECT_THAT(answer, HasSubstr(R"("text":"$b")"));
  EXPECT_THAT(answer,
              HasSubstr(R"("tokens":["$","b","<end>"],"token_logprobs":[null,-0.25,-0.5])"));
  EXPECT_THAT(complete(R"("prompt":"$b","max_tokens":1,"logprobs":0)"),
              HasSubstr(R"("tokens":[])"));
}

TEST_F(PromptLogprobsTest, OffsetsCountCharacters) {
  const std::string answer =
      complete(R"("prompt":"\u00e9x","max_tokens":2,"echo":true,"logprobs":0)");
  EXPECT_THAT(answer, HasSubstr(R"("tokens":["bytes:\\xc3","bytes:\\xa9","x","bytes:\\xc3",)"));
  EXPECT_THAT(answer, HasSubstr(R"("text_offset":[0,0,1,2,2])"));
  EXPECT_THAT(answer, HasSubstr(R"("top_logprobs":[null,{},{},{},{}])"));
}

TEST_F(PromptLogprobsTest, APromptMayBeScoredWithoutAnAnswer) {
  const std::string answer =
      complete(R"("prompt":[[97,98],[99]],"max_tokens":0,"echo":true,"logprobs":1)");
  EXPECT_THAT(answer, HasSubstr(R"({"index":0,"text":"ab","logprobs":{"tokens":["a","b"],)"
                                R"("token_logprobs":[null,-0.25],"top_logprobs":[null,)"
                                R"({"c":-0.125}],"text_offset":[0,1]},"finish_reason":"length",)"));
  EXPECT_THAT(answer, HasSubstr(R"({"index":1,"text":"c","logprobs":{"tokens":["c"],)"
                                R"("token_logprobs":[null],"top_logprobs":[null],)"));
  EXPECT_THAT(answer, HasSubstr(R"("usage":{"prompt_tokens":3,"completion_tokens":0,)"));
  EXPECT_THAT(complete(R"("prompt":"ab","max_tokens":0)"),
              HasSubstr(R"("text":"","logprobs":null,"finish_reason":"length")"));
}

TEST_F(PromptLogprobsTest, StreamsBeginWithTheScoredPrompt) {
  const std::string answer =
      complete(R"("prompt":"ab","max_tokens":2,"echo":true,"logprobs":0,"stream":true)");
  size_t at = 0;
  for (const char* part :
       {R"("text":"ab","logprobs":{"tokens":["a","b"],"token_logprobs":[null,-0.25],)",
        R"("text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-0.5],)", R"("text_offset":[2])",
        R"("text":"b","logprobs":{"tokens":["b"])", R"("text_offset":[3])",
        R"("text":"","logprobs":null,"finish_reason":"length")", "data: [DONE]"}) {
    at = answer.find(part, at);
    ASSERT_NE(at, std::string::npos) << part << " in\n" << answer;
  }
  EXPECT_THAT(complete(R"("prompt":"ab","max_tokens":0,"echo":true,"logprobs":0,"stream":true)"),
              HasSubstr(R"("token_logprobs":[null,-0.25])"));
}

// An object for each token, of the token itself first.
TEST_F(PromptLogprobsTest, AreAFieldOfTheirOwn) {
  constexpr char kTwo[] =
      R"("prompt_logprobs":[null,{"98":{"logprob":-0.25,"rank":2,"decoded_token":"b"},)"
      R"("99":{"logprob":-0.125,"rank":1,"decoded_token":"c"}}])";
  EXPECT_THAT(complete(R"("prompt":"ab","max_tokens":1,"prompt_logprobs":1)"), HasSubstr(kTwo));
  EXPECT_THAT(complete(R"("prompt":"ab","max_tokens":1,"prompt_logprobs":2)"), HasSubstr(kTwo));
  EXPECT_THAT(chat("ab", R"("max_tokens":1,"prompt_logprobs":1)"), HasSubstr(kTwo));
  EXPECT_THAT(complete(R"("prompt":"ab","max_tokens":1)"), Not(HasSubstr("prompt_logprobs")));
  // Each of both takes as many alternatives as it asked for.
  const std::string both =
      complete(R"("prompt":"ab","max_tokens":0,"prompt_logprobs":0,"echo":true,"logprobs":1)");
  EXPECT_THAT(both, HasSubstr(R"("top_logprobs":[null,{"c":-0.125}])"));
  EXPECT_THAT(both, HasSubstr(R"([null,{"98":{"logprob":-0.25,"rank":2,"decoded_token":"b"}}])"));
}

TEST_F(PromptLogprobsTest, RefusesWhatItCannotGive) {
  EXPECT_THAT(complete(R"("prompt":"ab","prompt_logprobs":21)"),
              HasSubstr(R"("param":"prompt_logprobs")"));
  EXPECT_THAT(complete(R"("prompt":"ab","prompt_logprobs":-1)"),
              HasSubstr(R"("param":"prompt_logprobs")"));
  EXPECT_THAT(complete(R"("prompt":"ab","prompt_logprobs":1,"stream":true)"),
              HasSubstr("not available when stream is true"));
  EXPECT_THAT(chat("ab", R"("max_tokens":0)"), HasSubstr(R"("param":"max_tokens")"));
  EXPECT_THAT(complete(R"("prompt":"ab","max_tokens":-1)"), HasSubstr(R"("param":"max_tokens")"));
}

}  // namespace
}  // namespace nibble
