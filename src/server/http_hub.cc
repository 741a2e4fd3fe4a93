#include "server/http_hub.h"

#include <chrono>

#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>

#include "base/process.h"

namespace nibble {
namespace {

// Bodies below this leave little: the allocator may keep it for the next ones.
constexpr uint64_t kGoneWorthReleasing = uint64_t{1} << 20;
// Bounds how often, and lets go what still holds on to a request that was just answered.
constexpr auto kReleaseDelay = std::chrono::seconds(1);

}  // namespace

void HttpHub::remove(const std::shared_ptr<HttpConnection>& connection) {
  const std::lock_guard lock(mutex);
  connections.erase(connection);
  changed.notify_all();
}

bool HttpHub::hold(uint64_t& held, uint64_t bytes) {
  uint64_t total = body_bytes;
  uint64_t part = 0;
  do {
    part = total - held + bytes > options.bodies_limit ? 0 : bytes;
  } while (!body_bytes.compare_exchange_weak(total, total - held + part));
  if (part < held) {
    body_gone(held - part);
  }
  held = part;
  return part == bytes;
}

void HttpHub::body_gone(uint64_t bytes) {
  gone_bytes_ += bytes;
  if (gone_bytes_ < kGoneWorthReleasing || release_due_.exchange(true)) {
    return;
  }
  const auto timer = std::make_shared<boost::asio::steady_timer>(io, kReleaseDelay);
  timer->async_wait([this, timer](const boost::system::error_code&) {
    release_due_ = false;
    gone_bytes_ = 0;
    release_free_memory();
  });
}

}  // namespace nibble
