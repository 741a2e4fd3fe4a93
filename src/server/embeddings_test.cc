#include <cmath>
#include <string>

#include "server/embedding_text.h"
#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class EmbeddingsTest : public AppTest {
 protected:
  void SetUp() override {
    AppTest::SetUp();
    serve({.pooling = Pooling::kLast, .can_be_cut = true, .dimensions = {2, 3}});
  }
  /// Serves with this form of embeddings from now on.
  void serve(EmbeddingForm form, Status refusal = {}) {
    auto options = context_->options;
    options.embedding = std::move(form);
    options.no_embeddings = std::move(refusal);
    previous_.push_back(std::move(context_));
    context_ = std::make_unique<AppContext>(std::move(options), engine_, text_);
    gate_.open(*context_);
  }
  std::string embed(const std::string& members) {
    return call("POST", "/v1/embeddings", "{" + members + "}");
  }
  void expect_refused(const std::string& members, const std::string& param) {
    EXPECT_THAT(embed(members), HasSubstr(R"("param":")" + param + "\"")) << members;
  }

  std::vector<std::unique_ptr<AppContext>> previous_;
};

// Of "a" (97) the fake's hidden state is {97, 3, 0, 4}.
TEST_F(EmbeddingsTest, OneForEachInputInItsOrder) {
  EXPECT_THAT(
      embed(R"("input":"xa","normalize":false)"),
      HasSubstr(
          R"({"object":"list","data":[{"object":"embedding","index":0,"embedding":[97,3,0,4]}],)"
          R"("model":"fake","usage":{"prompt_tokens":2,"total_tokens":2}})"));
  EXPECT_THAT(embed(R"("input":["a","bc"],"normalize":false,"model":"fake")"),
              HasSubstr(R"([97,3,0,4]},{"object":"embedding","index":1,"embedding":[99,3,0,4]}],)"
                        R"("model":"fake","usage":{"prompt_tokens":3,"total_tokens":3}})"));
  EXPECT_THAT(embed(R"("input":[1,2],"normalize":false)"), HasSubstr("[2,3,0,4]"));
  EXPECT_THAT(embed(R"("input":[[1],[2,5]],"normalize":false)"),
              HasSubstr(R"([1,3,0,4]},{"object":"embedding","index":1,"embedding":[5,3,0,4])"));
  EXPECT_EQ(engine_.last().pooling, Pooling::kLast);
  EXPECT_EQ(engine_.last().max_tokens, 0);
  serve({.pooling = Pooling::kMean});
  EXPECT_THAT(embed(R"("input":"ac","normalize":false)"), HasSubstr("[98,3,0,4]"));
}

TEST_F(EmbeddingsTest, AreOfLengthOneAndCutBefore) {
  EXPECT_THAT(embed(R"("input":[0])"), HasSubstr("\"embedding\":[0,0.6,0,0.8]"));
  EXPECT_THAT(embed(R"("input":[4],"dimensions":2)"), HasSubstr("\"embedding\":[0.8,0.6]"));
  EXPECT_THAT(embed(R"("input":[4],"dimensions":4,"normalize":false)"), HasSubstr("[4,3,0,4]"));
  // 0x3f4ccccd, 0x3f19999a
  EXPECT_THAT(embed(R"("input":[4],"dimensions":2,"encoding_format":"base64")"),
              HasSubstr("\"embedding\":\"zcxMP5qZGT8=\""));
}

TEST_F(EmbeddingsTest, DimensionsAreThoseThatTheModelHas) {
  expect_refused(R"("input":"a","dimensions":1)", "dimensions");
  expect_refused(R"("input":"a","dimensions":5)", "dimensions");
  expect_refused(R"("input":"a","dimensions":0)", "dimensions");
  serve({.can_be_cut = true});
  EXPECT_THAT(embed(R"("input":"a","dimensions":1)"), HasSubstr("\"embedding\":[1]"));
  serve({});
  EXPECT_THAT(embed(R"("input":"a","dimensions":2)"), HasSubstr("is_matryoshka"));
  EXPECT_THAT(embed(R"("input":"a","dimensions":4)"), HasSubstr("200 OK"));
}

TEST_F(EmbeddingsTest, FieldsOfVllmReachTheEngine) {
  EXPECT_THAT(embed(R"("input":"abcdef","truncate_prompt_tokens":2,"priority":3,"cache_salt":"s",)"
                    R"("add_special_tokens":false,"normalize":false,"user":"me","wibble":1)"),
              HasSubstr("X-Nibble-Warning: ignored: user; 1 unknown field\r\n"));
  EXPECT_EQ(engine_.last().prompt, (std::vector<int32_t>{'e', 'f'}));
  EXPECT_EQ(engine_.last().priority, 3);
  EXPECT_EQ(engine_.last().cache_salt, "s");
  const std::string metrics = call("GET", "/metrics");
  EXPECT_THAT(metrics, HasSubstr(R"(field="user"} 1)"));
  EXPECT_THAT(metrics, HasSubstr(R"(finished_reason="stop"} 1)"));
}

TEST_F(EmbeddingsTest, ErrorsNameTheField) {
  for (const char* input :
       {"", R"(,"input":"")", R"(,"input":[])", R"(,"input":[[]])", R"(,"input":7)",
        R"(,"input":[1.5])", R"(,"input":[300])", R"(,"input":{"a":1})", R"(,"input":["a",1])"}) {
    expect_refused(R"("model":"fake")" + std::string(input), "input");
  }
  expect_refused(R"("input":")" + std::string(1001, 'a') + "\"", "input");  // of 1000
  EXPECT_THAT(embed(R"("input":")" + std::string(1000, 'a') + "\""), HasSubstr("200 OK"));
  expect_refused(R"("input":"a","encoding_format":"hex")", "encoding_format");
  expect_refused(R"("input":"a","embed_dtype":"float16")", "embed_dtype");
  expect_refused(R"("input":"a","endianness":"big")", "endianness");
  expect_refused(R"("input":"a","truncate_prompt_tokens":0)", "truncate_prompt_tokens");
  expect_refused(R"("input":"a","model":"nobody")", "model");
  std::string many = "\"a\"";
  for (int i = 0; i < 100; ++i) {  // of 100
    many += ",\"a\"";
  }
  expect_refused(R"("input":[)" + many + "]", "input");
  serve({}, Status(StatusCode::kUnsupported, "modules.json: embeddings need Dense"));
  EXPECT_THAT(embed(R"("input":"a")"), HasSubstr("modules.json: embeddings need Dense"));
}

TEST_F(EmbeddingsTest, EndWithTheirClientOrWhenAborted) {
  engine_.held = true;
  {
    Client client(server_->port());
    client.send(
        "POST /v1/embeddings HTTP/1.1\r\nX-Request-Id: one\r\nContent-Length: 13\r\n\r\n"
        "{\"input\":\"a\"}");
    ASSERT_TRUE(eventually([&] { return engine_.stats().running == 1; }));
  }
  Client client(server_->port());
  client.send(
      "POST /v1/embeddings HTTP/1.1\r\nX-Request-Id: two\r\nContent-Length: 13\r\n"
      "Connection: close\r\n\r\n{\"input\":\"a\"}");
  ASSERT_TRUE(eventually([&] { return engine_.stats().running == 2; }));
  EXPECT_THAT(call("POST", "/abort_request", R"({"rid":"two"})"), HasSubstr(R"("aborted":1)"));
  engine_.held = false;
  EXPECT_THAT(client.read_until(""), HasSubstr("aborted"));
  EXPECT_TRUE(eventually([&] { return engine_.stats().running == 0; }));
}

TEST_F(EmbeddingsTest, FailureOfTheEngineIsAnError) {
  engine_.refuse(Status(StatusCode::kResourceExhausted, "full"));
  EXPECT_THAT(embed(R"("input":["a","b"])"), HasSubstr("429"));
}

TEST(EmbeddingText, IsWhatItsNumbersAre) {
  EXPECT_EQ(embedding_json(std::vector<float>{0.1F, -1.0F, 3e-9F}, EmbeddingEncoding::kFloat),
            "[0.1,-1,3e-09]");
  EXPECT_EQ(embedding_json({}, EmbeddingEncoding::kBase64), "\"\"");
  EXPECT_EQ(embedding_of(std::vector<float>{0, 0}, 2, VectorLength::kOne),
            (std::vector<float>{0, 0}));
  std::vector<float> odd;
  for (int i = 0; i < 100; ++i) {
    odd.push_back(std::ldexp(-1.2345678F, i - 120));
    for (const auto encoding : {EmbeddingEncoding::kFloat, EmbeddingEncoding::kBase64}) {
      EXPECT_LE(std::ssize(embedding_json(odd, encoding)),
                longest_embedding(std::ssize(odd), encoding));
    }
  }
}

}  // namespace
}  // namespace nibble
