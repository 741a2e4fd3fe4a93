#include "server/http.h"

#include <atomic>
#include <string>

#include "server/http_text.h"
#include "server/testing/app_fixture.h"

namespace nibble {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// What clients do that break rules, or that keep them in unusual ways.
using HttpTest = AppTest;

std::string chunked(const std::string& body, size_t size) {
  std::string out;
  for (size_t at = 0; at < body.size(); at += size) {
    const std::string part = body.substr(at, size);
    out += fmt::format("{:x};note=\"x\"\r\n{}\r\n", part.size(), part);
  }
  return out + "0\r\nTrailer: x\r\n\r\n";
}

constexpr const char* kChunkedHead =
    "POST /v1/completions HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";

TEST_F(HttpTest, HttpItselfFailsWithErrorObjects) {
  Client garbage(server_->port());
  garbage.send("hello\r\n\r\n");
  EXPECT_THAT(garbage.read_until(""), HasSubstr(R"({"error":{)"));
  Client large(server_->port());
  large.send("GET / HTTP/1.1\r\nX: " + std::string(40000, 'x') + "\r\n\r\n");
  EXPECT_THAT(large.read_until(""), HasSubstr("HTTP/1.1 431"));
  Client slow(server_->port());
  slow.send("POST /tokenize HTTP/1.1\r\nContent-Length: 5\r\n\r\nab");
  EXPECT_THAT(slow.read_until(""), HasSubstr("HTTP/1.1 408"));
}

TEST_F(HttpTest, ReadsChunkedBodies) {
  for (const size_t size : {1, 7, 100}) {
    Client client(server_->port());
    client.send(kChunkedHead + chunked(R"({"prompt":"abc","max_tokens":4})", size));
    EXPECT_THAT(client.read_until(""), HasSubstr(R"("text":"abca")")) << size;
  }
  Client large(server_->port());
  large.send(kChunkedHead + chunked(std::string(6000, 'x'), 1000));
  EXPECT_THAT(large.read_until(""), HasSubstr("HTTP/1.1 413"));
  Client wrong(server_->port());
  wrong.send(std::string(kChunkedHead) + "zz\r\nabc\r\n");
  EXPECT_THAT(wrong.read_until(""), HasSubstr("HTTP/1.1 400"));
  Client endless(server_->port());  // a chunk's extension that does not end
  endless.send(std::string(kChunkedHead) + "5;" + std::string(200000, 'x'));
  EXPECT_THAT(endless.read_until(""), HasSubstr("HTTP/1.1 431"));
}

TEST_F(HttpTest, RefusesAmbiguousLengths) {
  for (const char* fields :
       {"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 3\r\nContent-Length: 4\r\n", "Content-Length: -1\r\n",
        "Content-Length: 99999999999999999999\r\n", "Content-Length: 0x3\r\n"}) {
    Client client(server_->port());
    client.send("POST /v1/completions HTTP/1.1\r\n" + std::string(fields) + "\r\n{}\r\n");
    EXPECT_THAT(client.read_until(""), HasSubstr("HTTP/1.1 400")) << fields;
  }
}

TEST_F(HttpTest, RefusesForTheHeadWithoutReadingTheBody) {
  Client unknown(server_->port());
  unknown.send("POST /nowhere HTTP/1.1\r\nContent-Length: 4000\r\n\r\n");
  EXPECT_THAT(unknown.read_until(""), HasSubstr("HTTP/1.1 404"));
  Client large(server_->port());
  large.send("POST /v1/completions HTTP/1.1\r\nContent-Length: 5001\r\n\r\n");
  EXPECT_THAT(large.read_until(""), HasSubstr("HTTP/1.1 413"));
  Client waiting(server_->port());
  waiting.send("GET /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n");
  const std::string answer = waiting.read_until("");
  EXPECT_THAT(answer, HasSubstr("HTTP/1.1 405"));
  EXPECT_THAT(answer, Not(HasSubstr("100 Continue")));
}

TEST_F(HttpTest, RefusesCompressedBodiesUnread) {
  Client client(server_->port());
  client.send(
      "POST /tokenize HTTP/1.1\r\nContent-Encoding: gzip\r\nExpect: 100-continue\r\n"
      "Content-Length: 29\r\n\r\n");
  client.send("GET /version HTTP/1.1\r\nX: y\r\n\r\n");  // is the body, and no request
  const std::string answer = client.read_until("");
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 415 Unsupported Media Type\r\n")) << answer;
  EXPECT_THAT(answer, HasSubstr("Connection: close"));
  EXPECT_THAT(answer, HasSubstr("\\\"gzip\\\" is not supported: send the body uncompressed"));
  EXPECT_THAT(answer, Not(HasSubstr("version\"")));
  EXPECT_THAT(call("POST", "/tokenize", R"({"prompt":"ab"})", "Content-Encoding: identity\r\n"),
              HasSubstr("[97,98]"));
  EXPECT_THAT(call("GET", "/version", "", "Content-Encoding: gzip\r\n"), HasSubstr("200 OK"));
  Client transfer(server_->port());
  transfer.send("POST /tokenize HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n");
  EXPECT_THAT(transfer.read_until(""), HasSubstr("HTTP/1.1 400"));
}

TEST_F(HttpTest, AsksForABodyThatWaitsToBeAsked) {
  Client client(server_->port());
  client.send("POST /detokenize HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 15\r\n\r\n");
  EXPECT_THAT(client.read_until("\r\n\r\n"), HasSubstr("100 Continue"));
  client.send(R"({"tokens":[97]})");
  EXPECT_THAT(client.read_until("a\"}"), HasSubstr(R"({"prompt":"a"})"));
}

TEST_F(HttpTest, SlowClientsHoldNobodyUp) {
  std::vector<std::unique_ptr<Client>> slow;
  for (int i = 0; i < 200; ++i) {
    slow.push_back(std::make_unique<Client>(server_->port()));
    slow.back()->send("POST /v1/completions HTTP/1.1\r\nX-Slow: ");
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(chat("ab", R"("max_tokens":2)"), HasSubstr(R"("content":"ab")"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  EXPECT_THAT(slow.front()->read_until(""), HasSubstr("HTTP/1.1 408"));
  EXPECT_THAT(slow.back()->read_until(""), HasSubstr("HTTP/1.1 408"));
  Client silent(server_->port());  // is closed without a word
  EXPECT_EQ(silent.read_until(""), "");
}

TEST_F(HttpTest, LargeBodiesTogetherAreBounded) {
  const std::string body(4999, ' ');
  const std::string head = "POST /tokenize HTTP/1.1\r\nContent-Length: 5000\r\n\r\n";
  std::vector<std::unique_ptr<Client>> slow;
  for (int i = 0; i < 3; ++i) {
    slow.push_back(std::make_unique<Client>(server_->port()));
    slow.back()->send(head + body);
  }
  // Whichever would go over the limit of 12000 bytes is refused, and makes room for the others.
  int refused = 0;
  for (const auto& client : slow) {
    refused += client->read_until("").find("HTTP/1.1 503") != std::string::npos ? 1 : 0;
  }
  EXPECT_EQ(refused, 1);
  slow.clear();
  EXPECT_THAT(call("POST", "/tokenize", R"({"prompt":")" + std::string(800, 'x') + "\"}"),
              HasSubstr("HTTP/1.1 200"));
}

/// A server whose one route writes without end, or once.
class UnreadTest : public ::testing::Test {
 protected:
  void start(std::function<void(const std::shared_ptr<HttpExchange>&)> answer) {
    HttpOptions options;
    options.port = 0;
    options.write_timeout_s = 0.5;
    auto server = HttpServer::start(
        options, {.handle =
                      [this, answer = std::move(answer)](const auto& exchange) {
                        exchange->on_disconnect([this] { gone_ = true; });
                        answer(exchange);
                      },
                  .check_head = [](const HttpRequest&) { return std::nullopt; },
                  .error_body =
                      [](const HttpError& error) { return HttpResponse{.status = error.status}; }});
    ASSERT_TRUE(server.ok()) << server.status().message();
    server_ = std::move(server).value();
  }

  std::atomic<bool> gone_{false};
  std::unique_ptr<HttpServer> server_;
};

constexpr const char* kAsk = "GET / HTTP/1.1\r\nConnection: close\r\n\r\n";

TEST_F(UnreadTest, AStreamThatNobodyTakesEndsAtABoundOfBytes) {
  std::atomic<int> pieces{0};
  start([&](const auto& exchange) {
    exchange->start_stream("text/event-stream");
    while (!gone_ && pieces < 200) {
      exchange->write(std::string(1 << 20, 'x'));
      ++pieces;
    }
  });
  Client client(server_->port());
  client.send(kAsk);
  EXPECT_TRUE(eventually([&] { return gone_.load(); }));
  EXPECT_GT(pieces, 60);  // 64 MiB, and what the kernel takes
  EXPECT_LT(pieces, 100);
}

TEST_F(UnreadTest, AStreamThatNobodyTakesEndsAfterABoundOfTime) {
  start([&](const auto& exchange) {
    exchange->start_stream("text/event-stream");
    exchange->write(std::string(20 << 20, 'x'));
  });
  Client client(server_->port());
  client.send(kAsk);
  EXPECT_TRUE(eventually([&] { return gone_.load(); }));
}

TEST_F(UnreadTest, AReaderThatIsSlowGetsAll) {
  start([&](const auto& exchange) {
    exchange->start_stream("text/event-stream");
    exchange->write(std::string(20 << 20, 'x'));
    exchange->finish();
  });
  Client client(server_->port());
  client.send(kAsk);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_GT(client.read_until("").size(), size_t{20} << 20);
  EXPECT_FALSE(gone_);
}

TEST_F(HttpTest, AnswersPipelinedRequestsInOrder) {
  Client client(server_->port());
  std::string all;
  for (int i = 0; i < 50; ++i) {
    all += "GET /version HTTP/1.1\r\nX-Request-Id: n" + std::to_string(i) + "\r\n\r\n";
  }
  client.send(all);
  const std::string answer = client.read_until("X-Request-Id: n49");
  size_t at = 0;
  for (int i = 0; i < 50; ++i) {
    at = answer.find("X-Request-Id: n" + std::to_string(i) + "\r\n", at);
    ASSERT_NE(at, std::string::npos) << i;
  }
}

TEST_F(HttpTest, NoticesThatAPipeliningClientIsGone) {
  {
    Client client(server_->port());
    begin_stream(client, 900);
    client.send("GET /version HTTP/1.1\r\n\r\n");
    EXPECT_EQ(engine_.stats().running, 1);
  }
  EXPECT_TRUE(eventually([&] { return engine_.stats().running == 0; }));
}

TEST_F(HttpTest, TakesOldAndUnusualForms) {
  Client old(server_->port());
  const std::string body = R"({"prompt":"ab","max_tokens":2,"stream":true})";
  old.send("POST /v1/completions HTTP/1.0\r\nContent-Length: " + std::to_string(body.size()) +
           "\r\n\r\n" + body);
  const std::string answer = old.read_until("");
  EXPECT_THAT(answer, HasSubstr("data: [DONE]\n\n"));
  EXPECT_THAT(answer, Not(HasSubstr("chunked")));
  EXPECT_THAT(call("GET", "http://host:1/version"), HasSubstr("HTTP/1.1 200"));
  EXPECT_THAT(call("GET", "/v1/models/%66ake?x=1"), HasSubstr(R"("id":"fake")"));
  const std::string head = call("HEAD", "/version");
  EXPECT_THAT(head, HasSubstr("Content-Length: 15\r\n"));
  EXPECT_TRUE(head.ends_with("\r\n\r\n"));
}

TEST_F(HttpTest, TextThatIsNoUtf8IsRefusedInUtf8) {
  const std::string answer = chat("a\xFF\xC0", R"("n":1)");
  EXPECT_THAT(answer, HasSubstr("HTTP/1.1 400"));
  const auto error = Json::parse(answer.substr(answer.find("\r\n\r\n") + 4));
  ASSERT_TRUE(error.ok()) << error.status().message();
  const std::string lost = call("GET", "/\xFF%ff");
  EXPECT_TRUE(Json::parse(lost.substr(lost.find("\r\n\r\n") + 4)).ok());
}

TEST_F(HttpTest, MessagesDoNotEchoWithoutEnd) {
  const std::string answer = chat("x", R"("model":")" + std::string(4000, 'm') + "\"");
  EXPECT_THAT(answer, HasSubstr("HTTP/1.1 404"));
  EXPECT_LT(answer.size(), 1500U);
}

TEST(HttpText, FindsTheCodingOfABody) {
  EXPECT_EQ(content_coding({{"Content-Type", "gzip"}}), "");
  EXPECT_EQ(content_coding({{"Content-Encoding", ""}}), "");
  EXPECT_EQ(content_coding({{"Content-Encoding", " ,\tIdentity ,"}}), "");
  EXPECT_EQ(content_coding({{"content-encoding", "identity, br"}}), "br");
  EXPECT_EQ(content_coding({{"Content-Encoding", "identity"}, {"CONTENT-ENCODING", "x y,z"}}),
            "x y");
}

TEST(HttpText, ReturnsOnlyPlainRequestIds) {
  for (const std::string& id :
       {std::string("a"), std::string(128, 'x'), std::string("A-z_0.9:/+=")}) {
    EXPECT_EQ(usable_request_id(id), id);
  }
  for (const std::string& id :
       {std::string(), std::string(129, 'x'), std::string("a b"), std::string("a\tb"),
        std::string("a\"b"), std::string("a'b"), std::string("a`b"), std::string("a\\b"),
        std::string("a\x7f"), std::string("\u00e9"), std::string(1, '\0')}) {
    EXPECT_EQ(usable_request_id(id).size(), 32U) << id;
    EXPECT_NE(usable_request_id(id), id);
  }
}

TEST(HttpText, ReadsTargets) {
  EXPECT_EQ(parse_target("/a%20b?c=d?e").path, "/a b");
  EXPECT_EQ(parse_target("/a?c=d?e").query, "c=d?e");
  EXPECT_EQ(parse_target("HTTP://h/x").path, "/x");
  EXPECT_EQ(parse_target("http://h").path, "/");
  EXPECT_EQ(parse_target("/%zz%4").path, "/%zz%4");
}

}  // namespace
}  // namespace nibble
