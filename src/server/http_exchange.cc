#include "server/http_exchange.h"

#include <utility>

namespace nibble {
namespace {

class ConnectionExchange final : public HttpExchange {
 public:
  ConnectionExchange(std::shared_ptr<HttpConnection> connection,
                     uint64_t serial,
                     HttpRequest request)
      : connection_(std::move(connection)), serial_(serial), request_(std::move(request)) {}

  ~ConnectionExchange() override { connection_->body_gone(request_.body.size()); }
  ConnectionExchange(const ConnectionExchange&) = delete;
  ConnectionExchange& operator=(const ConnectionExchange&) = delete;

  const HttpRequest& request() const override { return request_; }
  void post(std::function<void()> task) override { connection_->post(std::move(task)); }
  void respond(HttpResponse response) override { connection_->respond(serial_, response); }
  using HttpExchange::start_stream;
  void start_stream(const std::string& content_type, const HttpHeaders& headers) override {
    connection_->start_stream(serial_, content_type, headers);
  }
  void write(std::string_view piece) override { connection_->write(serial_, piece); }
  void finish() override { connection_->finish(serial_); }
  bool started() const override { return connection_->started(serial_); }
  void on_disconnect(std::function<void()> callback) override {
    connection_->on_disconnect(serial_, std::move(callback));
  }

 private:
  std::shared_ptr<HttpConnection> connection_;
  uint64_t serial_;
  HttpRequest request_;
};

}  // namespace

std::shared_ptr<HttpExchange> make_exchange(std::shared_ptr<HttpConnection> connection,
                                            uint64_t serial,
                                            HttpRequest request) {
  return std::make_shared<ConnectionExchange>(std::move(connection), serial, std::move(request));
}

}  // namespace nibble
