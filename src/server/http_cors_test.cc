#include "server/http_cors.h"

#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr const char* kPage = "https://page.example";

HttpRequest request(const std::string& method, HttpHeaders headers) {
  return {.method = method, .path = "/v1/models", .headers = std::move(headers)};
}

TEST(Cors, IsOffUnlessAsked) {
  EXPECT_TRUE(cors_headers({}, request("GET", {{"Origin", kPage}})).empty());
  EXPECT_FALSE(cors_preflight(
      {}, request("OPTIONS", {{"Origin", kPage}, {"Access-Control-Request-Method", "GET"}})));
}

TEST(Cors, NamesTheOrigin) {
  EXPECT_EQ(cors_headers({.origins = {"*"}}, request("GET", {{"Origin", kPage}})),
            (HttpHeaders{{"Access-Control-Allow-Origin", "*"}}));
  EXPECT_TRUE(cors_headers({.origins = {"*"}}, request("GET", {})).empty());
  EXPECT_EQ(cors_headers({.origins = {"https://a", kPage}}, request("GET", {{"Origin", kPage}})),
            (HttpHeaders{{"Vary", "Origin"}, {"Access-Control-Allow-Origin", kPage}}));
  EXPECT_EQ(cors_headers({.origins = {"https://a"}}, request("GET", {{"Origin", kPage}})),
            (HttpHeaders{{"Vary", "Origin"}}));
  // With cookies a browser takes no "*".
  EXPECT_EQ(
      cors_headers({.origins = {"*"}, .credentials = true}, request("GET", {{"Origin", kPage}})),
      (HttpHeaders{{"Vary", "Origin"},
                   {"Access-Control-Allow-Origin", kPage},
                   {"Access-Control-Allow-Credentials", "true"}}));
}

TEST(Cors, AnswersPreflights) {
  const CorsOptions some{
      .origins = {kPage}, .methods = {"POST"}, .headers = {"Content-Type", "x-api-key"}};
  const auto status = [&](const char* origin, const char* method, const char* headers) {
    const auto answer =
        cors_preflight(some, request("OPTIONS", {{"Origin", origin},
                                                 {"Access-Control-Request-Method", method},
                                                 {"Access-Control-Request-Headers", headers}}));
    return answer ? answer->status : 0;
  };
  EXPECT_EQ(status(kPage, "POST", "content-type, X-Api-Key"), 200);
  EXPECT_EQ(status(kPage, "POST", ""), 200);
  EXPECT_EQ(status("https://a", "POST", ""), 400);
  EXPECT_EQ(status(kPage, "DELETE", ""), 400);
  EXPECT_EQ(status(kPage, "POST", "content-type,x-other"), 400);
  const auto all = cors_preflight(
      {.origins = {"*"}}, request("OPTIONS", {{"Origin", kPage},
                                              {"Access-Control-Request-Method", "POST"},
                                              {"Access-Control-Request-Headers", "x-other"}}));
  ASSERT_TRUE(all);
  EXPECT_EQ(all->headers,
            (HttpHeaders{{"Access-Control-Allow-Methods", "GET, POST, DELETE, HEAD, OPTIONS"},
                         {"Access-Control-Max-Age", "600"},
                         {"Access-Control-Allow-Headers", "x-other"}}));
  EXPECT_FALSE(cors_preflight({.origins = {"*"}}, request("OPTIONS", {{"Origin", kPage}})));
  EXPECT_FALSE(cors_preflight({.origins = {"*"}}, request("GET", {{"Origin", kPage}})));
}

class CorsTest : public AppTest {
 protected:
  CorsTest() {
    keys_ = {{.key = "secret", .name = "key-1"}};
    cors_.origins = {kPage};
  }
};

TEST_F(CorsTest, EveryAnswerSaysWhoMayReadIt) {
  const std::string origin = std::string("Origin: ") + kPage + "\r\n";
  const std::string allowed = std::string("Access-Control-Allow-Origin: ") + kPage + "\r\n";
  const std::string keyed = origin + "Authorization: Bearer secret\r\n";
  EXPECT_THAT(call("OPTIONS", "/v1/models", "", origin + "Access-Control-Request-Method: GET\r\n"),
              HasSubstr(allowed));  // without a key, as browsers ask
  EXPECT_THAT(call("GET", "/v1/models", "", keyed), HasSubstr(allowed));
  EXPECT_THAT(call("GET", "/v1/models", "", origin), HasSubstr(allowed));                     // 401
  EXPECT_THAT(call("POST", "/tokenize", std::string(6000, ' '), keyed), HasSubstr(allowed));  // 413
  EXPECT_THAT(
      call("POST", "/v1/completions", R"({"prompt":"a","stream":true,"max_tokens":1})", keyed),
      HasSubstr(allowed));
  EXPECT_THAT(call("GET", "/version", "", "Origin: https://other\r\n"),
              Not(HasSubstr("Access-Control-Allow-Origin")));
  EXPECT_THAT(call("OPTIONS", "/v1/models", "", keyed), HasSubstr("HTTP/1.1 405"));
}

}  // namespace
}  // namespace nibble
