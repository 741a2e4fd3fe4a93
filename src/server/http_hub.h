#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

#include <boost/asio/io_context.hpp>

#include "server/http.h"

namespace nibble {

class HttpConnection;

/// What the connections share with their server.
struct HttpHub {
  boost::asio::io_context io;  // outlives every connection
  HttpOptions options;
  HttpCallbacks callbacks;
  std::atomic<bool> listening{true};    // new connections are welcome
  std::atomic<uint64_t> body_bytes{0};  // of requests that are being read or answered
  std::atomic<bool> draining{false};    // connections close after their answer
  std::mutex mutex;
  std::condition_variable changed;
  std::set<std::shared_ptr<HttpConnection>> connections;  // under mutex

  void remove(const std::shared_ptr<HttpConnection>& connection);
  /// Counts a body of `bytes` where `held` were counted before. False, and none is counted, when
  /// the bodies of all connections would go over the limit.
  bool hold(uint64_t& held, uint64_t bytes);
  /// Tells that a body of `bytes` is gone. Once enough of them are, what the allocator keeps of
  /// them and of what was made from them goes back to the system, at most once a second.
  /// Thread-safe.
  void body_gone(uint64_t bytes);

 private:
  std::atomic<uint64_t> gone_bytes_{0};  // since memory was given back
  std::atomic<bool> release_due_{false};
};

}  // namespace nibble
