#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/error.h"
#include "server/gate.h"
#include "server/testing/fake_serving.h"

namespace nibble {

/// A client socket that speaks plain HTTP.
class Client final {
 public:
  explicit Client(uint16_t port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval limit{10, 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    connected_ = ::connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  ~Client() { ::close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void send(const std::string& text) {
    (void)!::send(socket_, text.data(), text.size(), MSG_NOSIGNAL);
  }
  /// Reads until `mark` was seen, the peer closes, or 10 s without data.
  std::string read_until(const std::string& mark) {
    std::string text;
    char buffer[4096];
    while (mark.empty() || text.find(mark) == std::string::npos) {
      const ssize_t size = ::recv(socket_, buffer, sizeof(buffer), 0);
      if (size <= 0) {
        break;
      }
      text.append(buffer, static_cast<size_t>(size));
    }
    return text;
  }
  [[nodiscard]] bool connected() const { return connected_; }

 private:
  int socket_;
  bool connected_ = false;
};

/// Waits up to 2 s.
inline bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000 && !condition(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return condition();
}

/// The routes over a fake engine, behind a real HTTP server on a free port.
class AppTest : public ::testing::Test {
 protected:
  void SetUp() override {
    context_ = std::make_unique<AppContext>(AppOptions{.model_names = {"fake"},
                                                       .api_keys = keys_,
                                                       .version = "1",
                                                       .request_timeout_s = timeout_,
                                                       .form = form_},
                                            engine_, text_);
    HttpOptions options;
    options.port = 0;
    options.body_limit = 5000;
    options.bodies_limit = 12000;
    options.read_timeout_s = 0.5;
    options.idle_timeout_s = 1;
    options.cors = cors_;
    auto server = HttpServer::start(options, gate_.callbacks());
    ASSERT_TRUE(server.ok()) << server.status().message();
    server_ = std::move(*server);
    if (!loading_) {
      gate_.open(*context_);
    }
  }

  std::string call(const std::string& method,
                   const std::string& path,
                   const std::string& body = "",
                   const std::string& headers = "") {
    Client client(server_->port());
    client.send(method + " " + path + " HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + headers +
                "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
    return client.read_until("");
  }
  std::string chat(const std::string& content, const std::string& members) {
    return call("POST", "/v1/chat/completions",
                R"({"messages":[{"role":"user","content":")" + content + "\"}]," + members + "}");
  }

  /// A streamed completion of `max_tokens` tokens, begun.
  void begin_stream(Client& client, int max_tokens) {
    const std::string body =
        R"({"prompt":"abc","stream":true,"max_tokens":)" + std::to_string(max_tokens) + "}";
    client.send("POST /v1/completions HTTP/1.1\r\nContent-Length: " + std::to_string(body.size()) +
                "\r\n\r\n" + body);
    client.read_until("data: ");
  }

  AnswerForm form_;  // of answers
  std::vector<ApiKey> keys_;
  double timeout_ = 0;
  CorsOptions cors_;
  bool loading_ = false;  // the gate stays shut
  AppGate gate_{"1"};
  FakeEngine engine_;
  const TextFrontend text_ = fake_text();
  std::unique_ptr<AppContext> context_;
  std::unique_ptr<HttpServer> server_;
};

}  // namespace nibble
