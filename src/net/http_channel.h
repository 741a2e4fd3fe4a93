#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/ip/tcp.hpp>

#include "net/http_client.h"

namespace nibble {

/// One connection of a client: connects, sends a request, reads its answer, and is then free for
/// the next.
class HttpChannel final : public std::enable_shared_from_this<HttpChannel> {
 public:
  using Clock = HttpClient::Clock;
  using tcp = boost::asio::ip::tcp;

  struct Owner {
    HttpClientOptions options;
    std::vector<tcp::endpoint> endpoints;  // tried in this order
    std::string authority;
    std::string path;
    /// Takes back a channel whose call has ended.
    std::function<void(const std::shared_ptr<HttpChannel>&)> on_free;
  };

  HttpChannel(boost::asio::io_context& io, Owner& owner) : socket_(io), owner_(owner) {}

  void start(uint64_t number, HttpCall call);
  /// Ends the call that runs.
  void end(const Status& status);
  /// Ends a call whose time is over.
  void check(Clock::time_point now);
  [[nodiscard]] uint64_t number() const { return number_; }
  [[nodiscard]] bool reusable() const { return reusable_; }

 private:
  void connect(size_t which);
  void send();
  void read();
  void on_read_end(const boost::system::error_code& error);
  void take(std::string_view bytes);
  void close();
  [[nodiscard]] std::string request_text() const;

  tcp::socket socket_;
  Owner& owner_;
  HttpCall call_;
  std::string out_;
  std::unique_ptr<HttpResponseParser> parser_;
  uint64_t number_ = 0;
  uint64_t epoch_ = 0;  // of the connection: what an older one still reports is void
  Clock::time_point deadline_;
  bool busy_ = false, connecting_ = false, writing_ = false;
  bool reused_ = false, reusable_ = false, heard_ = false;
  std::array<char, size_t{16} << 10> buffer_{};
};

}  // namespace nibble
