#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "net/http_response.h"
#include "net/url.h"

namespace nibble {

struct HttpClientOptions {
  double connect_s = 10;  // longest wait for a connection
  double stall_s = 600;   // longest wait for the next byte of an answer
};

struct HttpHeader {
  std::string name;
  std::string value;
};

/// One request, and what is told about its answer. The callbacks run within HttpClient::run().
struct HttpCall {
  using Time = std::chrono::steady_clock::time_point;

  std::string method = "GET";
  std::string target;               // below the URL's path: "/v1/models"
  std::vector<HttpHeader> headers;  // beside Host and those of the body
  std::string body;                 // JSON; none with GET
  std::function<void(const HttpHead&)> on_head;
  std::function<void(std::string_view, Time)> on_body;  // with the time at which it was read
  /// Called once, at last: ok when all of the answer has come, whatever its HTTP status.
  std::function<void(const Status&)> on_end;
};

/// Asks one server, any number of requests at a time, on the thread that calls run(). Connections
/// are kept and used again; a request on a kept one that the server has meanwhile closed is sent
/// again on a new one. Not thread-safe.
class HttpClient {
 public:
  using Clock = std::chrono::steady_clock;

  /// kNotFound when the host has no address.
  static Result<std::unique_ptr<HttpClient>> create(const Url& url,
                                                    const HttpClientOptions& options);
  virtual ~HttpClient() = default;

  /// Sends a request; callable from callbacks. Failures reach on_end: kUnavailable when the server
  /// cannot be reached, closes in mid-answer or stalls, kCorrupt when it speaks no HTTP. Returns
  /// the call's number.
  virtual uint64_t start(HttpCall call) = 0;
  /// Ends a call: its connection is closed, on_end gets kCancelled.
  virtual void cancel(uint64_t number) = 0;
  /// Runs `task` at this time.
  virtual void at(Clock::time_point when, std::function<void()> task) = 0;
  /// Works until every call has ended and every task has run.
  virtual void run() = 0;
};

/// All of an answer.
struct HttpAnswer {
  HttpHead head;
  std::string body;
};

/// One request and its whole answer, of at most 64 MiB.
Result<HttpAnswer> fetch(HttpClient& client, HttpCall call);

}  // namespace nibble
