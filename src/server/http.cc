#include "server/http.h"

#include <algorithm>
#include <chrono>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <boost/asio.hpp>

#include "base/log.h"
#include "base/thread_name.h"
#include "server/http_connection.h"

namespace nibble {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using tcp = asio::ip::tcp;

constexpr int kListenBacklog = 4096;
constexpr auto kAcceptPause = std::chrono::milliseconds(50);

/// Accepts connections and runs the threads that serve them.
class Server final : public HttpServer {
 public:
  explicit Server(std::shared_ptr<HttpHub> hub)
      : hub_(std::move(hub)),
        acceptor_(asio::make_strand(hub_->io)),
        pause_(acceptor_.get_executor()) {}

  ~Server() override {
    hub_->io.stop();
    for (std::thread& thread : threads_) {
      thread.join();
    }
    std::set<std::shared_ptr<HttpConnection>> left;
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
      return make_error(StatusCode::kIo,
                        "cannot listen on {} port {}: {}; choose another --port or --host",
                        options.host, options.port, error.message());
    }
    port_ = acceptor_.local_endpoint(error).port();
    return {};
  }

  void serve() {
    accept();
    for (int i = 0; i < std::max(1, hub_->options.threads); ++i) {
      threads_.emplace_back([this, i] {
        name_thread("http", i);
        hub_->io.run();
      });
    }
  }

  uint16_t port() const override { return port_; }

  void begin_drain() override {
    hub_->draining = true;
    const std::lock_guard lock(hub_->mutex);
    for (const auto& connection : hub_->connections) {
      connection->post([connection] { connection->drain(); });
    }
  }

  void stop_listening() override {
    hub_->listening = false;
    asio::post(acceptor_.get_executor(), [this] {
      error_code ignored;
      acceptor_.close(ignored);
    });
    begin_drain();
  }

  bool wait_idle(double timeout_s) override {
    std::unique_lock lock(hub_->mutex);
    return hub_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                  [&] { return hub_->connections.empty(); });
  }

 private:
  void accept() {
    acceptor_.async_accept(asio::make_strand(hub_->io),
                           [this](const error_code& error, tcp::socket socket) {
                             if (acceptor_.is_open() && !hub_->io.stopped()) {
                               on_accept(error, std::move(socket));
                             }
                           });
  }

  void on_accept(const error_code& error, tcp::socket socket) {
    if (error) {  // out of descriptors, most likely: the pause lets some close
      if (!std::exchange(accept_fails_, true)) {
        NIBBLE_LOG(kWarning, "cannot accept connections: {}", error.message());
      }
      pause_.expires_after(kAcceptPause);
      pause_.async_wait([this](const error_code& cancelled) {
        if (!cancelled && acceptor_.is_open()) {
          accept();
        }
      });
      return;
    }
    accept_fails_ = false;
    const auto connection = std::make_shared<HttpConnection>(std::move(socket), hub_);
    {
      const std::lock_guard lock(hub_->mutex);
      hub_->connections.insert(connection);
    }
    connection->post([connection] { connection->start(); });
    accept();
  }

  std::shared_ptr<HttpHub> hub_;
  tcp::acceptor acceptor_;
  asio::steady_timer pause_;
  bool accept_fails_ = false;
  std::vector<std::thread> threads_;
  uint16_t port_ = 0;
};

}  // namespace

Result<std::unique_ptr<HttpServer>> HttpServer::start(const HttpOptions& options,
                                                      HttpCallbacks callbacks) {
  auto hub = std::make_shared<HttpHub>();
  hub->options = options;
  hub->callbacks = std::move(callbacks);
  auto server = std::make_unique<Server>(std::move(hub));
  NIBBLE_RETURN_IF_ERROR(server->listen());
  server->serve();
  return std::unique_ptr<HttpServer>(std::move(server));
}

}  // namespace nibble
