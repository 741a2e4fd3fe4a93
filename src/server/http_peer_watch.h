#pragma once

#include <functional>
#include <memory>

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>

namespace nibble {

/// Tells, while a request is being answered, that the client has closed its connection. Belongs to
/// the socket's strand.
class HttpPeerWatch final {
 public:
  using Socket = boost::asio::ip::tcp::socket;

  /// `wanted` says whether an answer is under way; `on_gone` runs if the client goes away then.
  HttpPeerWatch(Socket& socket, std::function<bool()> wanted, std::function<void()> on_gone)
      : socket_(socket),
        again_(socket.get_executor()),
        wanted_(std::move(wanted)),
        on_gone_(std::move(on_gone)) {}

  /// Watches as long as that is wanted; `owner` is kept alive meanwhile.
  void start(const std::shared_ptr<void>& owner);
  void stop() { again_.cancel(); }

 private:
  void on_readable(const std::shared_ptr<void>& owner);
  [[nodiscard]] bool gone();

  Socket& socket_;
  boost::asio::steady_timer again_;
  std::function<bool()> wanted_;
  std::function<void()> on_gone_;
  bool waiting_ = false;
};

}  // namespace nibble
