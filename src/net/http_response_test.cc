#include "net/http_response.h"

#include <gtest/gtest.h>

namespace nibble {
namespace {

struct Read {
  HttpHead head;
  std::string body;
  Status status;
  bool done = false;
  bool keeps_alive = false;
};

// Reads `text` in two pieces, and the end of the connection when the answer is not over.
Read read(std::string_view text, size_t cut) {
  Read out;
  HttpResponseParser parser({.on_head = [&](const HttpHead& head) { out.head = head; },
                             .on_body = [&](std::string_view bytes) { out.body += bytes; }});
  out.status = parser.push(text.substr(0, cut));
  if (out.status.ok() && cut < text.size()) {
    out.status = parser.push(text.substr(cut));
  }
  out.done = parser.done();
  out.keeps_alive = parser.keeps_alive();
  if (out.status.ok() && !out.done) {
    out.status = parser.finish();
  }
  return out;
}

constexpr std::string_view kChunked =
    "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n7;x=y\r\n, world\r\n0\r\nT: v\r\n\r\n";
constexpr std::string_view kSized =
    "HTTP/1.1 429 Too Many\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nfull";

TEST(HttpResponse, ChunkedCutAnywhere) {
  for (size_t cut = 1; cut <= kChunked.size(); ++cut) {
    const Read out = read(kChunked, cut);
    ASSERT_TRUE(out.status.ok()) << cut << ": " << out.status.message();
    ASSERT_EQ(out.head.status, 200) << cut;
    ASSERT_EQ(out.head.content_type, "text/event-stream");
    ASSERT_EQ(out.body, "hello, world") << cut;
    ASSERT_TRUE(out.done && out.keeps_alive) << cut;
  }
}

TEST(HttpResponse, SizedCutAnywhere) {
  for (size_t cut = 1; cut <= kSized.size(); ++cut) {
    const Read out = read(kSized, cut);
    ASSERT_TRUE(out.status.ok() && out.done) << cut;
    ASSERT_EQ(out.head.retry_after, "3");
    ASSERT_EQ(out.body, "full");
  }
}

TEST(HttpResponse, BodyUntilTheEndOfTheConnection) {
  const Read out = read("HTTP/1.1 200 OK\r\n\r\nall of it", 10);
  EXPECT_TRUE(out.status.ok()) << out.status.message();
  EXPECT_EQ(out.body, "all of it");
  EXPECT_FALSE(out.keeps_alive);
}

TEST(HttpResponse, HalfAnAnswerIsUnavailable) {
  for (size_t end = 1; end < kChunked.size(); ++end) {
    const Read out = read(kChunked.substr(0, end), end);
    ASSERT_EQ(out.status.code(), StatusCode::kUnavailable) << end << out.status.message();
  }
}

TEST(HttpResponse, WhatIsNoHttpIsCorrupt) {
  for (const std::string& text :
       {std::string("SSH-2.0-x\r\n\r\n"), std::string(kSized) + "more",
        "HTTP/1.1 200 OK\r\nX: " + std::string(40000, 'x') + "\r\n\r\n",
        std::string("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")}) {
    EXPECT_EQ(read(text, text.size()).status.code(), StatusCode::kCorrupt) << text.substr(0, 40);
  }
}

}  // namespace
}  // namespace nibble
