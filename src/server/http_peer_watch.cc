#include "server/http_peer_watch.h"

#include <chrono>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

namespace nibble {
namespace {

using boost::system::error_code;

constexpr auto kAgain = std::chrono::milliseconds(100);

}  // namespace

void HttpPeerWatch::start(const std::shared_ptr<void>& owner) {
  if (waiting_) {
    return;
  }
  waiting_ = true;
  socket_.async_wait(Socket::wait_read, [this, owner](const error_code& error) {
    waiting_ = false;
    if (!wanted_()) {
      return;
    }
    if (error) {
      on_gone_();
    } else {
      on_readable(owner);
    }
  });
}

/// Either the connection has ended, or the client sends its next request already.
void HttpPeerWatch::on_readable(const std::shared_ptr<void>& owner) {
  if (gone()) {
    on_gone_();
    return;
  }
  error_code ignored;
  if (socket_.available(ignored) == 0) {
    start(owner);
    return;
  }
  again_.expires_after(kAgain);  // a pipelined request stays readable: look now and then
  again_.async_wait([this, owner](const error_code& cancelled) {
    if (!cancelled && wanted_()) {
      start(owner);
    }
  });
}

bool HttpPeerWatch::gone() {
  tcp_info info{};
  socklen_t size = sizeof(info);
  if (getsockopt(socket_.native_handle(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
    return true;
  }
  return info.tcpi_state != TCP_ESTABLISHED;
}

}  // namespace nibble
