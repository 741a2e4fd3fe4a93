#include "server/http_output.h"

#include <utility>

#include <boost/asio/buffer.hpp>

namespace nibble {
namespace {

constexpr size_t kMaxUnsentBytes = size_t{64} << 20;

}  // namespace

Sent HttpOutput::send(std::string_view data, const std::shared_ptr<void>& owner) {
  if (unsent_.size() + data.size() > kMaxUnsentBytes) {
    return Sent::kRefused;
  }
  if (!idle()) {
    unsent_ += data;
    return Sent::kPending;
  }
  touch();
  // Most pieces of a stream fit the kernel's buffer: no round trip through the event loop for them.
  boost::system::error_code error;
  const size_t taken = socket_.write_some(boost::asio::buffer(data), error);
  if (taken == data.size()) {
    return Sent::kWhole;
  }
  unsent_ = data.substr(taken);
  flush(owner);  // finds an error of the socket again
  return Sent::kPending;
}

void HttpOutput::flush(const std::shared_ptr<void>& owner) {
  if (sent_ == in_flight_.size()) {
    in_flight_ = std::exchange(unsent_, {});
    sent_ = 0;
  }
  const auto rest = boost::asio::buffer(in_flight_) + sent_;
  socket_.async_write_some(
      rest, [this, owner](const boost::system::error_code& error, size_t size) {
        touch();
        sent_ += size;
        if (!error && (sent_ < in_flight_.size() || !unsent_.empty())) {
          flush(owner);
          return;
        }
        std::string().swap(in_flight_);  // with its memory: the client may stay long
        sent_ = 0;
        on_settled_(error);
      });
}

}  // namespace nibble
