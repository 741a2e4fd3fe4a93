#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <boost/asio/ip/tcp.hpp>

namespace nibble {

/// What became of bytes that were given to an HttpOutput.
enum class Sent : uint8_t {
  kWhole,    // the kernel has them
  kPending,  // they are sent in the background
  kRefused,  // dropped: the client has left too much unread and counts as gone
};

/// Bytes on their way to one client, in order. They leave at once while the kernel takes them, and
/// what is added while it takes none leaves together. Everything belongs to the socket's strand.
class HttpOutput final {
 public:
  using Clock = std::chrono::steady_clock;
  using Socket = boost::asio::ip::tcp::socket;
  using Settled = std::function<void(const boost::system::error_code&)>;

  /// `on_settled` runs when all that was pending is sent, or with the error when the socket failed.
  HttpOutput(Socket& socket, Settled on_settled)
      : socket_(socket), on_settled_(std::move(on_settled)) {}

  /// Adds bytes to a socket that does not block. `owner` is kept alive while they are pending.
  [[nodiscard]] Sent send(std::string_view data, const std::shared_ptr<void>& owner);

  [[nodiscard]] bool idle() const { return in_flight_.empty(); }
  /// When the kernel last took bytes from here.
  [[nodiscard]] Clock::time_point last_progress() const { return last_progress_; }
  /// Restarts the clock of last_progress().
  void touch() { last_progress_ = Clock::now(); }

 private:
  void flush(const std::shared_ptr<void>& owner);

  Socket& socket_;
  Settled on_settled_;
  std::string unsent_, in_flight_;
  size_t sent_ = 0;  // of in_flight_
  Clock::time_point last_progress_ = Clock::now();
};

}  // namespace nibble
