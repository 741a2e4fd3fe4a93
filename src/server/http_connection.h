#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "server/http_hub.h"
#include "server/http_output.h"
#include "server/http_peer_watch.h"

namespace nibble {

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
  /// Tells that the body of a request of this connection is gone. Thread-safe.
  void body_gone(uint64_t bytes) { hub_->body_gone(bytes); }

  // The answering side, for the exchange; `serial` says which request it means.
  void respond(uint64_t serial, const HttpResponse& response);
  void start_stream(uint64_t serial, const std::string& content_type, const HttpHeaders& headers);
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
  bool hold(uint64_t bytes) { return hub_->hold(held_, bytes); }
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
  std::string request_id_, path_;
  HttpHeaders cors_;  // of the answer
  std::function<void()> on_disconnect_;
};

}  // namespace nibble
