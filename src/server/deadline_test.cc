#include <chrono>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;

class DeadlineTest : public AppTest {
 protected:
  std::string complete(const std::string& members) {
    return call("POST", "/v1/completions", R"({"prompt":"abc",)" + members + "}");
  }
  /// Seconds that the engine gave the last request.
  double limit() {
    const Request request = engine_.last();
    return std::chrono::duration<double>(request.deadline - request.made).count();
  }
};

TEST_F(DeadlineTest, ARequestMayHaveOne) {
  EXPECT_THAT(complete(R"("max_tokens":1,"timeout":2.5)"), HasSubstr("200 OK"));
  EXPECT_NEAR(limit(), 2.5, 1e-6);
  EXPECT_THAT(complete(R"("max_tokens":1)"), HasSubstr("200 OK"));
  EXPECT_EQ(engine_.last().deadline, std::chrono::steady_clock::time_point::max());
  for (const char* bad : {"0", "-1", "\"5\"", "1e9", "true"}) {
    const std::string answer = complete(std::string(R"("timeout":)") + bad);
    EXPECT_THAT(answer, HasSubstr("400 Bad Request")) << bad;
    EXPECT_THAT(answer, HasSubstr(R"("param":"timeout")")) << bad;
  }
}

TEST_F(DeadlineTest, HoldsOnEveryRoute) {
  const std::string messages = R"("messages":[{"role":"user","content":"ab$"}])";
  for (const auto& [path, body] :
       {std::pair<std::string, std::string>{"/v1/chat/completions", messages},
        {"/v1/messages", messages + R"(,"max_tokens":1)"},
        {"/v1/responses", R"("input":"ab$")"},
        {"/generate", R"("text":"ab$")"}}) {
    EXPECT_THAT(call("POST", path, "{" + body + R"(,"timeout":7})"), HasSubstr("200 OK")) << path;
    EXPECT_NEAR(limit(), 7, 1e-6) << path;
  }
}

TEST_F(DeadlineTest, WithoutATokenItIsAnError) {
  engine_.held = true;
  const std::string answer = complete(R"("timeout":0.05)");
  EXPECT_THAT(answer, HasSubstr("504 Gateway Timeout"));
  EXPECT_THAT(answer,
              HasSubstr(R"("type":"timeout_error","param":null,"code":"deadline_exceeded")"));
  EXPECT_THAT(complete(R"("timeout":0.05,"stream":true)"),
              HasSubstr(R"("code":"deadline_exceeded")"));
  EXPECT_THAT(call("POST", "/v1/messages",
                   R"({"max_tokens":5,"timeout":0.05,"messages":[{"role":"user","content":"a"}]})"),
              HasSubstr(R"("error":{"type":"timeout_error")"));
}

TEST_F(DeadlineTest, AnAnswerThatHasBegunEndsWithTheReason) {
  engine_.most_tokens = 3;
  const std::string answer = complete(R"("timeout":0.1)");
  EXPECT_THAT(answer, HasSubstr(R"("text":"abc")"));
  EXPECT_THAT(answer, HasSubstr(R"("finish_reason":"length","stop_reason":"timeout")"));
  const std::string stream = chat("abc", R"("timeout":0.1,"stream":true)");
  EXPECT_THAT(stream, HasSubstr(R"("finish_reason":"length","stop_reason":"timeout")"));
  EXPECT_THAT(stream, HasSubstr("data: [DONE]"));
  EXPECT_THAT(call("POST", "/generate", R"({"text":"abc","timeout":0.1})"),
              HasSubstr(R"("finish_reason":{"type":"abort","message":"the time limit)"));
  EXPECT_THAT(call("GET", "/metrics"), HasSubstr("finished_reason=\"timeout\"} 3\n"));
}

class ServerDeadlineTest : public DeadlineTest {
 protected:
  ServerDeadlineTest() { timeout_ = 3; }
};

TEST_F(ServerDeadlineTest, IsTheMostThatARequestGets) {
  for (const auto& [members, seconds] : {std::pair{R"("max_tokens":1)", 3.0},
                                         {R"("max_tokens":1,"timeout":1)", 1.0},
                                         {R"("max_tokens":1,"timeout":10)", 3.0}}) {
    EXPECT_THAT(complete(members), HasSubstr("200 OK"));
    EXPECT_NEAR(limit(), seconds, 1e-6);
  }
}

}  // namespace
}  // namespace nibble
