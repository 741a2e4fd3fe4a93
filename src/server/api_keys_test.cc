#include "server/api_keys.h"

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class ApiKeyFileTest : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  Result<std::vector<ApiKey>> read(const std::string& text,
                                   const std::vector<std::string>& given = {}) const {
    std::ofstream(path_) << text;
    return read_api_keys(given, path_);
  }

  std::string path_ = testing::TempDir() + "/api_keys_" + std::to_string(::getpid());
};

TEST_F(ApiKeyFileTest, HasAKeyANameAndAShareOnEachLine) {
  const auto keys = read("# who may\n\nk1 alice 2.5\r\n  k2\tbob\nk3\n", {"", "k0"});
  ASSERT_TRUE(keys.ok()) << keys.status().message();
  std::vector<std::string> all;
  for (const ApiKey& key : *keys) {
    all.push_back(fmt::format("{} {} {}", key.key, key.name, key.share));
  }
  EXPECT_THAT(all, testing::ElementsAre("k0 key-1 1", "k1 alice 2.5", "k2 bob 1", "k3 key-4 1"));
  EXPECT_TRUE(read_api_keys({}, "")->empty());
}

TEST_F(ApiKeyFileTest, ErrorsNameTheLineAndHideTheKey) {
  for (const auto& [text, word] :
       {std::pair{"# nothing\n", "there is no key"},
        {"secret a\nsecret b\n", "line 2: this key is that of a already"},
        {"secret a\nother a\n", "line 2: the name a is taken"},
        {"secret a 0\n", "line 1: behind the name stands a share"},
        {"secret a nan\n", "line 1: behind the name stands a share"},
        {"secret a 2x\n", "line 1: behind the name stands a share"},
        {"secret a 1 b\n", "without blanks"},
        {"secret\x01 a\n", "printable"},
        {"secret \xc3\xa4\n", "printable"}}) {
    const Status status = read(text).status();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(status.message(), HasSubstr(word));
    EXPECT_THAT(status.message(), Not(HasSubstr("secret")));
  }
  EXPECT_EQ(read_api_keys({}, path_ + "x").status().code(), StatusCode::kNotFound);
  EXPECT_THAT(read_api_keys({"a", "a"}, "").status().message(), HasSubstr("--api-key:"));
}

class KeysTest : public AppTest {
 protected:
  KeysTest() {
    keys_ = {{.key = "one", .name = "alice"}, {.key = "two", .name = "bob", .share = 3}};
  }
  std::string complete(const std::string& header) {
    return call("POST", "/v1/completions", R"({"prompt":"abc","max_tokens":4})", header + "\r\n");
  }
};

TEST_F(KeysTest, TellTheEngineWhoAsks) {
  EXPECT_THAT(complete("Authorization: Bearer one"), HasSubstr("200 OK"));
  EXPECT_EQ(engine_.last().client, 0);
  EXPECT_EQ(engine_.last().share, 1);
  EXPECT_THAT(complete("x-api-key: two"), HasSubstr("200 OK"));
  EXPECT_EQ(engine_.last().client, 1);
  EXPECT_EQ(engine_.last().share, 3);
  for (const char* header : {"X: y", "x-api-key: on", "x-api-key: ones", "x-api-key: "}) {
    EXPECT_THAT(complete(header), HasSubstr("HTTP/1.1 401")) << header;
  }
}

TEST_F(KeysTest, AreCountedByName) {
  complete("x-api-key: one");
  complete("x-api-key: two");
  complete("x-api-key: two");
  const std::string metrics = call("GET", "/metrics");
  const auto sample = [](const std::string& name, const std::string& key, int value) {
    return fmt::format("nibble:key_{}_total{{model_name=\"fake\",engine=\"0\",key=\"{}\"}} {}\n",
                       name, key, value);
  };
  EXPECT_THAT(metrics, HasSubstr(sample("requests", "alice", 1)));
  EXPECT_THAT(metrics, HasSubstr(sample("requests", "bob", 2)));
  EXPECT_THAT(metrics, HasSubstr(sample("prompt_tokens", "bob", 6)));
  EXPECT_THAT(metrics, HasSubstr(sample("generation_tokens", "bob", 8)));
  EXPECT_THAT(metrics, Not(HasSubstr("\"one\"")));
  EXPECT_THAT(metrics, Not(HasSubstr("\"two\"")));
}

}  // namespace
}  // namespace nibble
