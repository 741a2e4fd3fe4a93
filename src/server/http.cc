#include "server/http.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include <boost/asio.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include "base/log.h"
#include "server/http_text.h"

namespace nibble {
namespace {

namespace asio = boost::asio;
namespace beast_http = boost::beast::http;
using boost::system::error_code;
using tcp = asio::ip::tcp;
using Clock = std::chrono::steady_clock;

constexpr int kListenBacklog = 4096;
constexpr auto kWatchInterval = std::chrono::milliseconds(100);
constexpr double kLingerSeconds = 2;
constexpr auto kTick = std::chrono::milliseconds(250);
constexpr size_t kMaxUnsentBytes = size_t{64} << 20;  // a client that reads nothing is dropped here

Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
}

class Connection;

/// What the connections share with their server.
struct Hub {
  asio::io_context io;  // outlives every connection
  HttpOptions options;
  HttpHandler handler;
  HttpErrorBody error_body;
  std::atomic<bool> draining{false};
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::shared_ptr<Connection>> connections;  // under mutex

  void remove(const std::shared_ptr<Connection>& connection) {
    const std::lock_guard lock(mutex);
    connections.erase(connection);
    changed.notify_all();
  }
};

/// One socket: reads a request, lets the handler answer it, reads the next. All members belong to
/// the socket's strand.
class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, std::shared_ptr<Hub> hub)
      : hub_(std::move(hub)),
        socket_(std::move(socket)),
        tick_(socket_.get_executor()),
        watch_(socket_.get_executor()) {}

  void start();
  void drain();  // closes if idle
  void close();

  // The answering side, for Exchange; `serial` says which request means us.
  void post(std::function<void()> task);
  void respond(uint64_t serial, HttpResponse response);
  void start_stream(uint64_t serial, const std::string& content_type);
  void write(uint64_t serial, std::string_view piece);
  void finish(uint64_t serial);
  void on_disconnect(uint64_t serial, std::function<void()> callback);
  [[nodiscard]] bool started(uint64_t serial) const { return serial != serial_ || started_; }

 private:
  enum class Phase { kIdle, kReading, kAnswering, kClosed };

  void read_head();
  void read_body();
  void dispatch();
  void refuse(int status, const std::string& message);
  void on_read_error(const error_code& error);
  void arm_tick();
  void on_tick();
  void watch_client();
  [[nodiscard]] bool client_gone();
  void send(std::string data);
  void flush();
  void on_sent(const error_code& error);
  void answer_complete();
  void linger();
  [[nodiscard]] bool current(uint64_t serial) const {
    return phase_ == Phase::kAnswering && serial == serial_ && !complete_;
  }

  std::shared_ptr<Hub> hub_;
  tcp::socket socket_;
  asio::steady_timer tick_;
  asio::steady_timer watch_;
  boost::beast::flat_buffer buffer_;
  std::optional<beast_http::request_parser<beast_http::string_body>> parser_;
  Phase phase_ = Phase::kIdle;
  uint64_t serial_ = 0;
  Clock::time_point phase_since_ = Clock::now();
  Clock::time_point last_sent_ = Clock::now();
  Clock::time_point send_since_ = Clock::now();
  bool started_ = false, streaming_ = false, complete_ = false;
  bool keep_alive_ = true, chunked_ = true, head_only_ = false, event_stream_ = false;
  bool waiting_readable_ = false;
  bool partial_ = false, late_ = false, lingering_ = false;  // about the request being read
  std::string request_id_;
  std::string unsent_, in_flight_;
  std::function<void()> on_disconnect_;
};

/// The handler's view of one request on a connection.
class Exchange final : public HttpExchange {
 public:
  Exchange(std::shared_ptr<Connection> connection, uint64_t serial, HttpRequest request)
      : connection_(std::move(connection)), serial_(serial), request_(std::move(request)) {}

  const HttpRequest& request() const override { return request_; }
  void post(std::function<void()> task) override { connection_->post(std::move(task)); }
  void respond(HttpResponse response) override {
    connection_->respond(serial_, std::move(response));
  }
  void start_stream(const std::string& content_type) override {
    connection_->start_stream(serial_, content_type);
  }
  void write(std::string_view piece) override { connection_->write(serial_, piece); }
  void finish() override { connection_->finish(serial_); }
  bool started() const override { return connection_->started(serial_); }
  void on_disconnect(std::function<void()> callback) override {
    connection_->on_disconnect(serial_, std::move(callback));
  }

 private:
  std::shared_ptr<Connection> connection_;
  uint64_t serial_;
  HttpRequest request_;
};

void Connection::start() {
  error_code ignored;
  socket_.set_option(tcp::no_delay(true), ignored);
  arm_tick();
  read_head();
}

void Connection::drain() {
  if (phase_ == Phase::kIdle && buffer_.size() == 0) {
    close();
  }
}

void Connection::close() {
  if (phase_ == Phase::kClosed) {
    return;
  }
  const bool interrupted = phase_ == Phase::kAnswering && !complete_;
  phase_ = Phase::kClosed;
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_both, ignored);
  socket_.close(ignored);
  tick_.cancel();
  watch_.cancel();
  const auto callback = std::exchange(on_disconnect_, nullptr);
  if (interrupted && callback) {
    callback();
  }
  hub_->remove(shared_from_this());
}

void Connection::read_head() {
  phase_ = Phase::kIdle;
  phase_since_ = Clock::now();
  partial_ = late_ = false;
  if (hub_->draining && buffer_.size() == 0) {
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

void Connection::read_body() {
  phase_ = Phase::kReading;
  const auto expect = parser_->get()[beast_http::field::expect];
  if (boost::beast::iequals(expect, "100-continue") && !parser_->is_done()) {
    send("HTTP/1.1 100 Continue\r\n\r\n");
  }
  beast_http::async_read(socket_, buffer_, *parser_,
                         [self = shared_from_this()](const error_code& error, size_t) {
                           if (self->phase_ == Phase::kClosed) {
                             return;
                           }
                           if (error) {
                             self->on_read_error(error);
                           } else {
                             self->dispatch();
                           }
                         });
}

void Connection::on_read_error(const error_code& error) {
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

/// Answers a request that never became whole, and closes afterwards.
void Connection::refuse(int status, const std::string& message) {
  phase_ = Phase::kAnswering;
  ++serial_;
  started_ = streaming_ = complete_ = false;
  parser_.reset();
  keep_alive_ = false;
  head_only_ = false;
  request_id_ = random_id();
  respond(serial_, hub_->error_body(status, message));
}

void Connection::dispatch() {
  auto message = parser_->release();
  parser_.reset();
  phase_ = Phase::kAnswering;
  ++serial_;
  started_ = streaming_ = complete_ = false;
  keep_alive_ = message.keep_alive() && !hub_->draining;
  chunked_ = message.version() >= 11;
  head_only_ = message.method() == beast_http::verb::head;
  HttpRequest request;
  request.method = std::string(message.method_string());
  const std::string target(message.target());
  const size_t mark = target.find('?');
  request.path = percent_decode(target.substr(0, mark));
  request.query = mark == std::string::npos ? "" : target.substr(mark + 1);
  for (const auto& field : message) {
    request.headers.emplace_back(std::string(field.name_string()), std::string(field.value()));
  }
  request.body = std::move(message.body());
  request.id = usable_request_id(request.header("X-Request-Id"));
  request_id_ = request.id;
  last_sent_ = Clock::now();
  watch_client();
  const auto exchange = std::make_shared<Exchange>(shared_from_this(), serial_, std::move(request));
  const uint64_t serial = serial_;
  try {
    hub_->handler(exchange);
  } catch (const std::exception& error) {  // the route wrapper: see docs/architecture.md
    NIBBLE_LOG(kError, "request {}: internal error: {}", request_id_, error.what());
    if (!started(serial)) {
      respond(serial, hub_->error_body(500, "internal error; the server's log says more"));
    } else {
      close();
    }
  }
}

void Connection::post(std::function<void()> task) {
  asio::post(socket_.get_executor(), [self = shared_from_this(), task = std::move(task)] {
    try {
      task();
    } catch (const std::exception& error) {  // the route wrapper, for what comes later
      NIBBLE_LOG(kError, "request {}: internal error: {}", self->request_id_, error.what());
      if (self->phase_ == Phase::kAnswering && !self->started_) {
        self->respond(self->serial_, self->hub_->error_body(500, "internal error"));
      } else {
        self->close();
      }
    }
  });
}

void Connection::respond(uint64_t serial, HttpResponse response) {
  if (!current(serial) || started_) {
    return;
  }
  started_ = true;
  keep_alive_ = keep_alive_ && !hub_->draining;
  std::string data = response_head(
      {response.status, response.content_type, request_id_, keep_alive_}, response.headers);
  data += fmt::format("Content-Length: {}\r\n\r\n", response.body.size());
  if (!head_only_) {
    data += response.body;
  }
  complete_ = true;
  on_disconnect_ = nullptr;
  send(std::move(data));
}

void Connection::start_stream(uint64_t serial, const std::string& content_type) {
  if (!current(serial) || started_) {
    return;
  }
  started_ = streaming_ = true;
  event_stream_ = content_type.starts_with("text/event-stream");
  keep_alive_ = keep_alive_ && chunked_ && !hub_->draining;
  std::string data = response_head({200, content_type, request_id_, keep_alive_},
                                   {{"Cache-Control", "no-cache"}, {"X-Accel-Buffering", "no"}});
  data += chunked_ ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n";
  send(std::move(data));
}

void Connection::write(uint64_t serial, std::string_view piece) {
  if (!current(serial) || !streaming_ || piece.empty()) {
    return;
  }
  send(chunked_ ? fmt::format("{:x}\r\n{}\r\n", piece.size(), piece) : std::string(piece));
}

void Connection::finish(uint64_t serial) {
  if (!current(serial) || !streaming_) {
    return;
  }
  complete_ = true;
  on_disconnect_ = nullptr;
  if (chunked_) {
    send("0\r\n\r\n");
  } else if (in_flight_.empty()) {
    answer_complete();
  }
}

void Connection::on_disconnect(uint64_t serial, std::function<void()> callback) {
  if (current(serial)) {
    on_disconnect_ = std::move(callback);
  } else if (serial != serial_ || phase_ == Phase::kClosed) {
    callback();
  }
}

void Connection::send(std::string data) {
  unsent_ += data;
  if (unsent_.size() > kMaxUnsentBytes) {
    close();
  } else if (in_flight_.empty()) {
    flush();
  }
}

void Connection::flush() {
  in_flight_ = std::exchange(unsent_, {});
  send_since_ = Clock::now();
  asio::async_write(
      socket_, asio::buffer(in_flight_),
      [self = shared_from_this()](const error_code& error, size_t) { self->on_sent(error); });
}

void Connection::on_sent(const error_code& error) {
  in_flight_.clear();
  last_sent_ = Clock::now();
  if (phase_ == Phase::kClosed) {
    return;
  }
  if (error) {
    close();
  } else if (!unsent_.empty()) {
    flush();
  } else if (phase_ == Phase::kAnswering && complete_) {
    answer_complete();
  }
}

void Connection::answer_complete() {
  if (keep_alive_) {
    watch_.cancel();
    read_head();
    return;
  }
  // Closing with unread input would make the kernel send a reset that can overtake the answer: tell
  // the client that nothing more comes, and let the tick close what it leaves open.
  error_code ignored;
  socket_.shutdown(tcp::socket::shutdown_send, ignored);
  lingering_ = true;
  phase_ = Phase::kIdle;
  phase_since_ = Clock::now();
  linger();
}

void Connection::linger() {
  socket_.async_read_some(buffer_.prepare(64 << 10),
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
void Connection::arm_tick() {
  tick_.expires_after(kTick);
  tick_.async_wait([self = shared_from_this()](const error_code& error) {
    if (!error && self->phase_ != Phase::kClosed) {
      self->on_tick();
    }
  });
}

void Connection::on_tick() {
  const HttpOptions& options = hub_->options;
  const auto now = Clock::now();
  if (!in_flight_.empty() && now - send_since_ > seconds(options.write_timeout_s)) {
    close();
    return;
  }
  if (phase_ == Phase::kIdle || phase_ == Phase::kReading) {
    const bool partial = phase_ == Phase::kReading || (parser_ && parser_->got_some());
    if (partial && !partial_) {
      partial_ = true;
      phase_since_ = now;
    }
    const double limit = lingering_ ? kLingerSeconds
                         : partial  ? options.read_timeout_s
                                    : options.idle_timeout_s;
    if (now - phase_since_ > seconds(limit)) {
      if (!partial || lingering_ || late_) {
        close();
        return;
      }
      late_ = true;
      socket_.cancel();
    }
  }
  if (phase_ == Phase::kAnswering && streaming_ && event_stream_ && !complete_ &&
      in_flight_.empty() && now - last_sent_ > seconds(options.ping_interval_s)) {
    write(serial_, ": ping\n\n");
  }
  arm_tick();
}

/// While a request is being answered: waits until the socket is readable, then asks the kernel
/// whether that is a pipelined request or the end of the connection.
void Connection::watch_client() {
  if (waiting_readable_) {
    return;
  }
  waiting_readable_ = true;
  socket_.async_wait(tcp::socket::wait_read, [self = shared_from_this()](const error_code& error) {
    self->waiting_readable_ = false;
    if (self->phase_ != Phase::kAnswering || self->complete_) {
      return;
    }
    if (error || self->client_gone()) {
      self->close();
      return;
    }
    self->watch_.expires_after(kWatchInterval);
    self->watch_.async_wait([self](const error_code& cancelled) {
      if (!cancelled && self->phase_ == Phase::kAnswering && !self->complete_) {
        self->watch_client();
      }
    });
  });
}

bool Connection::client_gone() {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(socket_.native_handle(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
    return true;
  }
  return info.tcpi_state != TCP_ESTABLISHED;
}

class Server final : public HttpServer {
 public:
  explicit Server(std::shared_ptr<Hub> hub)
      : hub_(std::move(hub)), acceptor_(asio::make_strand(hub_->io)) {}

  ~Server() override {
    hub_->io.stop();
    for (std::thread& thread : threads_) {
      thread.join();
    }
    std::set<std::shared_ptr<Connection>> left;
    {
      const std::lock_guard lock(hub_->mutex);
      left = hub_->connections;
    }
    for (const auto& connection : left) {
      connection->close();
    }
    // What the closed sockets abandoned still owns connections, and they own the hub.
    error_code ignored;
    acceptor_.close(ignored);
    hub_->io.restart();
    hub_->io.poll();
  }

  Status listen() {
    const HttpOptions& options = hub_->options;
    error_code error;
    const std::string host = options.host == "localhost" ? "127.0.0.1" : options.host;
    const auto address = asio::ip::make_address(host, error);
    if (error) {
      return make_error(StatusCode::kInvalidArgument,
                        "--host {}: not an IP address; give one such as 127.0.0.1 or 0.0.0.0",
                        options.host);
    }
    const tcp::endpoint endpoint(address, options.port);
    acceptor_.open(endpoint.protocol(), error);
    if (!error) {
      acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    }
    if (!error) {
      acceptor_.bind(endpoint, error);
    }
    if (!error) {
      acceptor_.listen(kListenBacklog, error);
    }
    if (error) {
      return make_error(StatusCode::kIo, "cannot listen on {} port {}: {}; choose another --port",
                        options.host, options.port, error.message());
    }
    port_ = acceptor_.local_endpoint(error).port();
    return {};
  }

  void serve() {
    accept();
    for (int i = 0; i < std::max(1, hub_->options.threads); ++i) {
      threads_.emplace_back([this] { hub_->io.run(); });
    }
  }

  uint16_t port() const override { return port_; }

  void begin_drain() override {
    hub_->draining = true;
    asio::post(acceptor_.get_executor(), [this] {
      error_code ignored;
      acceptor_.close(ignored);
    });
    const std::lock_guard lock(hub_->mutex);
    for (const auto& connection : hub_->connections) {
      connection->post([connection] { connection->drain(); });
    }
  }

  bool wait_idle(double timeout_s) override {
    std::unique_lock lock(hub_->mutex);
    return hub_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                  [&] { return hub_->connections.empty(); });
  }

 private:
  void accept() {
    acceptor_.async_accept(
        asio::make_strand(hub_->io), [this](const error_code& error, tcp::socket socket) {
          if (!acceptor_.is_open() || hub_->io.stopped()) {
            return;
          }
          if (error) {  // out of descriptors, most likely: the pause lets some close
            NIBBLE_LOG(kWarning, "cannot accept a connection: {}", error.message());
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          } else {
            const auto connection = std::make_shared<Connection>(std::move(socket), hub_);
            {
              const std::lock_guard lock(hub_->mutex);
              hub_->connections.insert(connection);
            }
            connection->post([connection] { connection->start(); });
          }
          accept();
        });
  }

  std::shared_ptr<Hub> hub_;
  tcp::acceptor acceptor_;
  std::vector<std::thread> threads_;
  uint16_t port_ = 0;
};

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::start(const HttpOptions& options,
                                                      HttpHandler handler,
                                                      HttpErrorBody error_body) {
  auto hub = std::make_shared<Hub>();
  hub->options = options;
  hub->handler = std::move(handler);
  hub->error_body = std::move(error_body);
  auto server = std::make_unique<Server>(std::move(hub));
  NIBBLE_RETURN_IF_ERROR(server->listen());
  server->serve();
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace nibble
