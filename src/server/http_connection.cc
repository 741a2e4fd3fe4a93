#include "server/http_connection.h"

#include <exception>
#include <utility>

#include <boost/asio.hpp>
#include <boost/beast/http.hpp>
#include <fmt/format.h>

#include "base/log.h"
#include "server/http_cors.h"
#include "server/http_exchange.h"
#include "server/http_message.h"
#include "server/http_text.h"

namespace nibble {
namespace {

namespace asio = boost::asio;
namespace beast_http = boost::beast::http;

constexpr double kLingerSeconds = 2;
constexpr auto kTick = std::chrono::milliseconds(250);
constexpr size_t kReadSize = size_t{64} << 10;

HttpOutput::Clock::duration seconds(double value) {
  return std::chrono::duration_cast<HttpOutput::Clock::duration>(
      std::chrono::duration<double>(value));
}

}  // namespace

HttpConnection::HttpConnection(Socket socket, std::shared_ptr<HttpHub> hub)
    : hub_(std::move(hub)),
      socket_(std::move(socket)),
      tick_(socket_.get_executor()),
      watch_(
          socket_,
          [this] { return phase_ == Phase::kAnswering && !complete_; },
          [this] { close(); }),
      output_(socket_, [this](const error_code& error) { on_settled(error); }),
      // Bounds what is held of a header or of a chunk's frame; bodies pass through it.
      buffer_(hub_->options.header_limit + kReadSize) {}

void HttpConnection::start() {
  error_code ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  socket_.non_blocking(true, ignored);
  arm_tick();
  read_head();
}

void HttpConnection::drain() {
  if (phase_ == Phase::kIdle && over()) {
    close();
  }
}

/// Between requests: whether none may follow.
bool HttpConnection::over() const {
  return hub_->draining && buffer_.size() == 0 && (serial_ > 0 || !hub_->listening);
}

void HttpConnection::close() {
  if (phase_ == Phase::kClosed) {
    return;
  }
  const bool interrupted = phase_ == Phase::kAnswering && !complete_;
  phase_ = Phase::kClosed;
  hold(0);
  error_code ignored;
  socket_.shutdown(Socket::shutdown_both, ignored);
  socket_.close(ignored);
  tick_.cancel();
  watch_.stop();
  const auto callback = std::exchange(on_disconnect_, nullptr);
  if (interrupted && callback) {
    callback();
  }
  hub_->remove(shared_from_this());
}

void HttpConnection::read_head() {
  phase_ = Phase::kIdle;
  phase_since_ = Clock::now();
  partial_ = late_ = false;
  hold(0);
  if (over()) {
    close();
    return;
  }
  parser_.emplace();
  parser_->header_limit(hub_->options.header_limit);
  parser_->body_limit(hub_->options.body_limit);
  beast_http::async_read_header(socket_, buffer_, *parser_,
                                [self = shared_from_this()](const error_code& error, size_t) {
                                  if (self->phase_ == Phase::kClosed) {
                                    return;
                                  }
                                  if (error) {
                                    self->on_read_error(error);
                                  } else {
                                    self->read_body();
                                  }
                                });
}

/// A request that will be refused for its head is not worth reading.
bool HttpConnection::refused_early() {
  if (parser_->is_done()) {
    return false;
  }
  const HttpRequest head = to_http_request(parser_->get());
  auto answer = hub_->callbacks.check_head(head);
  if (!answer) {
    return false;
  }
  head_only_ = head.method == "HEAD";
  request_id_ = head.id;
  cors_ = cors_headers(hub_->options.cors, head);
  begin_answer();
  keep_alive_ = false;
  respond(serial_, *answer);
  return true;
}

void HttpConnection::read_body() {
  phase_ = Phase::kReading;
  if (const std::string coding = unknown_transfer_coding(parser_->get()); !coding.empty()) {
    refuse(400, fmt::format("Transfer-Encoding \"{}\" is not supported: send the body as it is, "
                            "chunked or with a Content-Length",
                            coding));
    return;
  }
  if (refused_early()) {
    return;
  }
  const auto expect = parser_->get()[beast_http::field::expect];
  if (boost::beast::iequals(expect, "100-continue") && !parser_->is_done()) {
    send("HTTP/1.1 100 Continue\r\n\r\n");
  }
  parser_->eager(true);
  read_more();
}

void HttpConnection::read_more() {
  if (parser_->is_done()) {
    dispatch();
    return;
  }
  beast_http::async_read_some(
      socket_, buffer_, *parser_, [self = shared_from_this()](const error_code& error, size_t) {
        if (self->phase_ == Phase::kClosed) {
          return;
        }
        const bool held = self->hold(self->parser_->get().body().size());
        if (error) {
          self->on_read_error(error);
        } else if (!held) {
          self->refuse(503, "too many large requests at once; try again later");
        } else {
          self->read_more();
        }
      });
}

void HttpConnection::on_read_error(const error_code& error) {
  if (late_) {
    refuse(408, fmt::format("the request did not arrive whole within {} s",
                            hub_->options.read_timeout_s));
  } else if (error == beast_http::error::body_limit) {
    refuse(413, fmt::format("the request body is larger than the limit of {} bytes",
                            hub_->options.body_limit));
  } else if (error == beast_http::error::header_limit ||
             error == beast_http::error::buffer_overflow) {
    refuse(431, fmt::format("the request header is larger than the limit of {} bytes",
                            hub_->options.header_limit));
  } else if (error.category() == make_error_code(beast_http::error::bad_method).category() &&
             error != beast_http::error::end_of_stream &&
             error != beast_http::error::partial_message) {
    refuse(400, "malformed HTTP request: " + error.message());
  } else {
    close();
  }
}

void HttpConnection::begin_answer() {
  parser_.reset();
  phase_ = Phase::kAnswering;
  ++serial_;
  started_ = streaming_ = complete_ = false;
  output_.touch();
}

/// Answers a request that never became whole, and closes afterwards.
void HttpConnection::refuse(int status, const std::string& message) {
  hold(0);
  const HttpRequest request = to_http_request(parser_->get());
  path_ = request.path;
  cors_ = cors_headers(hub_->options.cors, request);
  begin_answer();
  keep_alive_ = head_only_ = false;
  request_id_ = random_id();
  respond(serial_, hub_->callbacks.error_body({status, path_, message}));
}

void HttpConnection::dispatch() {
  auto message = parser_->release();
  begin_answer();
  keep_alive_ = message.keep_alive() && !hub_->draining;
  chunked_ = message.version() >= 11;
  head_only_ = message.method() == beast_http::verb::head;
  HttpRequest request = to_http_request(std::move(message));
  request_id_ = request.id;
  path_ = request.path;
  cors_ = cors_headers(hub_->options.cors, request);
  watch_.start(shared_from_this());
  const auto exchange = make_exchange(shared_from_this(), serial_, std::move(request));
  const uint64_t serial = serial_;
  if (const auto answer = cors_preflight(hub_->options.cors, exchange->request())) {
    respond(serial, *answer);
    return;
  }
  try {
    hub_->callbacks.handle(exchange);
  } catch (const std::exception& error) {  // the route wrapper: see docs/architecture.md
    NIBBLE_LOG(kError, "request {}: internal error: {}", request_id_, error.what());
    if (!started(serial)) {
      respond(serial, hub_->callbacks.error_body(
                          {500, path_, "internal error; the server's log says more"}));
    } else {
      close();
    }
  }
}

void HttpConnection::post(std::function<void()> task) {
  asio::post(socket_.get_executor(), [self = shared_from_this(), task = std::move(task)] {
    try {
      task();
    } catch (const std::exception& error) {  // the route wrapper, for what comes later
      NIBBLE_LOG(kError, "request {}: internal error: {}", self->request_id_, error.what());
      if (self->phase_ == Phase::kAnswering && !self->started_) {
        self->respond(self->serial_,
                      self->hub_->callbacks.error_body({500, self->path_, "internal error"}));
      } else {
        self->close();
      }
    }
  });
}

void HttpConnection::respond(uint64_t serial, const HttpResponse& response) {
  if (!current(serial) || started_) {
    return;
  }
  started_ = true;
  keep_alive_ = keep_alive_ && !hub_->draining;
  HttpHeaders headers = response.headers;
  headers.insert(headers.end(), cors_.begin(), cors_.end());
  std::string data =
      response_head({response.status, response.content_type, request_id_, keep_alive_}, headers);
  data += fmt::format("Content-Length: {}\r\n\r\n", response.body.size());
  if (!head_only_) {
    data += response.body;
  }
  complete_ = true;
  on_disconnect_ = nullptr;
  send(data);
}

void HttpConnection::start_stream(uint64_t serial,
                                  const std::string& content_type,
                                  const HttpHeaders& headers) {
  if (!current(serial) || started_) {
    return;
  }
  started_ = streaming_ = true;
  event_stream_ = content_type.starts_with("text/event-stream");
  keep_alive_ = keep_alive_ && chunked_ && !hub_->draining;
  HttpHeaders all = {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}};
  all.insert(all.end(), headers.begin(), headers.end());
  all.insert(all.end(), cors_.begin(), cors_.end());
  std::string data = response_head({200, content_type, request_id_, keep_alive_}, all);
  data += chunked_ ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n";
  send(data);
}

void HttpConnection::write(uint64_t serial, std::string_view piece) {
  if (!current(serial) || !streaming_ || piece.empty()) {
    return;
  }
  send(chunked_ ? fmt::format("{:x}\r\n{}\r\n", piece.size(), piece) : std::string(piece));
}

void HttpConnection::finish(uint64_t serial) {
  if (!current(serial) || !streaming_) {
    return;
  }
  complete_ = true;
  on_disconnect_ = nullptr;
  if (chunked_) {
    send("0\r\n\r\n");
  } else if (output_.idle()) {
    answer_complete();
  }
}

void HttpConnection::on_disconnect(uint64_t serial, std::function<void()> callback) {
  if (current(serial)) {
    on_disconnect_ = std::move(callback);
  } else if (serial != serial_ || phase_ == Phase::kClosed) {
    callback();
  }
}

void HttpConnection::send(const std::string& data) {
  const Sent sent = output_.send(data, shared_from_this());
  if (sent == Sent::kRefused) {
    close();
  } else if (sent == Sent::kWhole && phase_ == Phase::kAnswering && complete_) {
    asio::post(socket_.get_executor(), [self = shared_from_this()] { self->on_settled({}); });
  }
}

void HttpConnection::on_settled(const error_code& error) {
  if (phase_ == Phase::kClosed) {
    return;
  }
  if (error) {
    close();
  } else if (phase_ == Phase::kAnswering && complete_) {
    answer_complete();
  }
}

void HttpConnection::answer_complete() {
  if (keep_alive_) {
    watch_.stop();
    read_head();
    return;
  }
  // Closing with unread input would make the kernel send a reset that can overtake the answer: tell
  // the client that nothing more comes, and let the tick close what it leaves open.
  buffer_.clear();
  error_code ignored;
  socket_.shutdown(Socket::shutdown_send, ignored);
  lingering_ = true;
  phase_ = Phase::kIdle;
  phase_since_ = Clock::now();
  linger();
}

void HttpConnection::linger() {
  socket_.async_read_some(buffer_.prepare(kReadSize),
                          [self = shared_from_this()](const error_code& error, size_t) {
                            if (self->phase_ == Phase::kClosed) {
                              return;
                            }
                            if (error) {
                              self->close();
                            } else {
                              self->linger();
                            }
                          });
}

/// Deadlines: a request that does not arrive, a client that does not read, a silent stream.
void HttpConnection::arm_tick() {
  tick_.expires_after(kTick);
  tick_.async_wait([self = shared_from_this()](const error_code& error) {
    if (!error && self->phase_ != Phase::kClosed) {
      self->on_tick();
    }
  });
}

void HttpConnection::on_tick() {
  const HttpOptions& options = hub_->options;
  const auto now = Clock::now();
  if (!output_.idle() && now - output_.last_progress() > seconds(options.write_timeout_s)) {
    close();
    return;
  }
  if (phase_ == Phase::kIdle || phase_ == Phase::kReading) {
    check_arrival(now);
    if (phase_ == Phase::kClosed) {
      return;
    }
  }
  if (phase_ == Phase::kAnswering && streaming_ && event_stream_ && !complete_ && output_.idle() &&
      now - output_.last_progress() > seconds(options.ping_interval_s)) {
    write(serial_, ": ping\n\n");
  }
  arm_tick();
}

/// A connection may be silent for a while between requests; a request that was begun has to come.
void HttpConnection::check_arrival(Clock::time_point now) {
  const HttpOptions& options = hub_->options;
  const bool partial = phase_ == Phase::kReading || (parser_ && parser_->got_some());
  if (partial && !partial_) {
    partial_ = true;
    phase_since_ = now;
  }
  const double limit = lingering_ ? kLingerSeconds
                       : partial  ? options.read_timeout_s
                                  : options.idle_timeout_s;
  if (now - phase_since_ <= seconds(limit)) {
    return;
  }
  if (!partial || lingering_ || late_) {
    close();
    return;
  }
  late_ = true;
  socket_.cancel();
}

}  // namespace nibble
