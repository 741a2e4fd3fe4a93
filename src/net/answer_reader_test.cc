#include "net/answer_reader.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

struct Taken {
  std::string text;
  std::string reasoning;
  std::string finish_reason;
  int frames_with_choice = 0;
  int64_t tokens = 0;
  bool done = false;
  Status status;
};

struct Given {
  AnswerApi api = AnswerApi::kChat;
  int status = 200;
  const char* type = "text/event-stream; charset=utf-8";
};

Taken take(std::string_view body, const Given& given, size_t piece = 7) {
  Taken out;
  AnswerReader stream(given.api, [&](const AnswerFrame& frame) {
    out.text += frame.text;
    out.reasoning += frame.reasoning;
    out.finish_reason += frame.finish_reason;
    out.frames_with_choice += frame.has_choice ? 1 : 0;
    out.tokens = frame.usage ? frame.usage->completion_tokens : out.tokens;
    out.done = out.done || frame.done;
  });
  stream.head({.status = given.status, .content_type = given.type, .retry_after = ""});
  for (; !body.empty(); body.remove_prefix(std::min(piece, body.size()))) {
    stream.body(body.substr(0, piece));
  }
  out.status = stream.finish();
  return out;
}

TEST(AnswerReader, Chat) {
  const Taken out = take(
      R"(data: {"choices":[{"delta":{"role":"assistant","content":null,"reasoning_content":"hm"}}]}

: ping

data: {"choices":[{"delta":{"content":"yes","reasoning":null}}]}

data: {"choices":[{"delta":{"content":""},"finish_reason":"stop"}],"usage":null}

data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}

data: [DONE]

)",
      {});
  ASSERT_TRUE(out.status.ok()) << out.status.message();
  EXPECT_EQ(out.text, "yes");
  EXPECT_EQ(out.reasoning, "hm");
  EXPECT_EQ(out.finish_reason, "stop");
  EXPECT_EQ(out.frames_with_choice, 3);
  EXPECT_EQ(out.tokens, 9);
  EXPECT_TRUE(out.done);
}

TEST(AnswerReader, GenerateRepeatsItsText) {
  const Taken out = take(
      "data: {\"text\":\"a\",\"meta_info\":{\"completion_tokens\":1}}\n\n"
      "data: {\"text\":\"abc\",\"meta_info\":{\"completion_tokens\":2,"
      "\"finish_reason\":{\"type\":\"length\"}}}\n\ndata: [DONE]\n\n",
      {.api = AnswerApi::kGenerate});
  EXPECT_EQ(out.text, "abc");
  EXPECT_EQ(out.tokens, 2);
  EXPECT_EQ(out.finish_reason, "length");
}

TEST(AnswerReader, WholeAnswers) {
  const Taken text = take(R"({"choices":[{"text":"t","finish_reason":"length"}]})",
                          {.api = AnswerApi::kCompletions, .type = "application/json"});
  EXPECT_EQ(text.text, "t");
  const Taken chat =
      take(R"({"choices":[{"message":{"content":"c"}}],"usage":{}})", {.type = "application/json"});
  EXPECT_TRUE(chat.status.ok());
  EXPECT_EQ(chat.text, "c");
}

TEST(AnswerReader, ErrorsOfEveryShape) {
  const auto status_of = [](int status, const char* body) {
    return take(body, {.status = status, .type = "application/json"}).status;
  };
  EXPECT_EQ(status_of(401, R"({"error":"Unauthorized"})").message(), "HTTP 401: Unauthorized");
  EXPECT_EQ(status_of(401, "no").code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status_of(404, R"({"error":{"message":"no model"}})").code(), StatusCode::kNotFound);
  EXPECT_EQ(status_of(422, R"({"detail":"field"})").message(), "HTTP 422: field");
  EXPECT_EQ(status_of(400, R"({"message":"flat"})").message(), "HTTP 400: flat");
  EXPECT_EQ(status_of(429, "").code(), StatusCode::kUnavailable);
  EXPECT_EQ(status_of(500, "\x1b[2Ja\xff").message(), "HTTP 500:  [2Ja ");
}

TEST(AnswerReader, ErrorsWithinAStream) {
  EXPECT_EQ(
      take("data: {\"choices\":[{\"delta\":{}}]}\n\ndata: {\"error\":{\"message\":\"gone\"}}\n\n",
           {})
          .status.message(),
      "the server failed while it answered: gone");
  EXPECT_EQ(take("data: {nonsense\n\n", {}).status.code(), StatusCode::kCorrupt);
  EXPECT_EQ(take("[", {.type = "application/json"}).status.code(), StatusCode::kCorrupt);
}

}  // namespace
}  // namespace nibble
