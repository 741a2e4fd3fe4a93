#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "server/http.h"
#include "server/http_output.h"
#include "server/http_peer_watch.h"

namespace nibble {

class HttpConnection;

/// What the connections share with their server.
struct HttpHub {
  boost::asio::io_context io;  // outlives every connection
  HttpOptions options;
  HttpCallbacks callbacks;
  std::atomic<bool> listening{true};    // new connections are welcome
  std::atomic<uint64_t> body_bytes{0};  // of requests that are being read or answered
  std::atomic<bool> draining{false};    // connections close after their answer
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::shared_ptr<HttpConnection>> connections;  // under mutex

  void remove(const std::shared_ptr<HttpConnection>& connection);
};

/// One socket: reads a request, lets the handler answer it, reads the next. Everything but post()
/// belongs to the socket's strand.
class HttpConnection final : public std::enable_shared_from_this<HttpConnection> {
 public:
  using Socket = boost::asio::ip::tcp::socket;
  using error_code = boost::system::error_code;

  HttpConnection(Socket socket, std::shared_ptr<HttpHub> hub);

  void start();
  /// Closes between two requests, and before the first when no more connections are taken.
  void drain();
  void close();
  /// Runs `task` on the strand. Thread-safe.
  void post(std::function<void()> task);

  // The answering side, for the exchange; `serial` says which request it means.
  void respond(uint64_t serial, const HttpResponse& response);
  void start_stream(uint64_t serial, const std::string& content_type);
  void write(uint64_t serial, std::string_view piece);
  void finish(uint64_t serial);
  void on_disconnect(uint64_t serial, std::function<void()> callback);
  [[nodiscard]] bool started(uint64_t serial) const { return serial != serial_ || started_; }

 private:
  enum class Phase { kIdle, kReading, kAnswering, kClosed };
  using Clock = std::chrono::steady_clock;
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;

  [[nodiscard]] bool over() const;
  void read_head();
  [[nodiscard]] bool refused_early();
  void read_body();
  void read_more();
  /// Says how large the body is that this connection keeps in memory. False, and none is counted,
  /// when the bodies of all connections would go over the limit.
  bool hold(uint64_t bytes) {
    uint64_t total = hub_->body_bytes;
    uint64_t part = 0;
    do {
      part = total - held_ + bytes > hub_->options.bodies_limit ? 0 : bytes;
    } while (!hub_->body_bytes.compare_exchange_weak(total, total - held_ + part));
    held_ = part;
    return part == bytes;
  }
  void dispatch();
  void begin_answer();
  void refuse(int status, const std::string& message);
  void on_read_error(const error_code& error);
  void arm_tick();
  void on_tick();
  void check_arrival(Clock::time_point now);
  void send(const std::string& data);
  void on_settled(const error_code& error);
  void answer_complete();
  void linger();
  [[nodiscard]] bool current(uint64_t serial) const {
    return phase_ == Phase::kAnswering && serial == serial_ && !complete_;
  }

  std::shared_ptr<HttpHub> hub_;
  Socket socket_;
  boost::asio::steady_timer tick_;
  HttpPeerWatch watch_;
  HttpOutput output_;
  boost::beast::flat_buffer buffer_;
  std::optional<Parser> parser_;
  Phase phase_ = Phase::kIdle;
  uint64_t serial_ = 0;
  uint64_t held_ = 0;  // our part of the hub's body_bytes
  Clock::time_point phase_since_ = Clock::now();
  bool started_ = false, streaming_ = false, complete_ = false;
  bool keep_alive_ = true, chunked_ = true, head_only_ = false, event_stream_ = false;
  bool partial_ = false, late_ = false, lingering_ = false;  // about the request being read
  std::string request_id_;
  std::function<void()> on_disconnect_;
};

}  // namespace nibble
