#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace nibble {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;  // "GET"
  std::string path;    // without the query
  std::string query;   // without the question mark
  HttpHeaders headers;
  std::string body;
  std::string id;  // X-Request-Id of the client if it is usable, else a fresh one

  /// Value of the first header with this name (any case); "" if there is none.
  [[nodiscard]] std::string_view header(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string content_type = "application/json";
  HttpHeaders headers;
  std::string body;
};

/// One request and its answer. Everything but post() is called on the exchange's own thread of
/// control: inside the handler, or inside a function given to post(). After the client is gone the
/// writing calls do nothing.
class HttpExchange {
 public:
  virtual ~HttpExchange() = default;
  [[nodiscard]] virtual const HttpRequest& request() const = 0;
  /// Runs `task` on the exchange's thread of control, after what was posted before. Thread-safe.
  virtual void post(std::function<void()> task) = 0;
  /// Sends a whole answer.
  virtual void respond(HttpResponse response) = 0;
  /// Begins an answer of unknown length with status 200.
  virtual void start_stream(const std::string& content_type, const HttpHeaders& headers) = 0;
  void start_stream(const std::string& content_type) { start_stream(content_type, {}); }
  /// Sends one piece of a stream; pieces written while the socket is busy leave together.
  virtual void write(std::string_view piece) = 0;
  /// Ends a stream.
  virtual void finish() = 0;
  [[nodiscard]] virtual bool started() const = 0;
  /// `callback` runs once if the client goes away before the answer is complete.
  virtual void on_disconnect(std::function<void()> callback) = 0;
};

/// An error that HTTP itself finds (400, 408, 413, 431) or that a handler throws (500).
struct HttpError {
  int status = 500;
  std::string_view path;  // "" where the request is not known so far
  std::string_view message;
};
/// The answer to one, in the words of the application.
using HttpErrorBody = std::function<HttpResponse(const HttpError& error)>;
using HttpHandler = std::function<void(const std::shared_ptr<HttpExchange>&)>;
/// Looks at a request whose body has not come: an answer refuses it, and its body is not read.
using HttpHeadCheck = std::function<std::optional<HttpResponse>(const HttpRequest& head)>;

/// What a server needs of the application. Called from the server's threads.
struct HttpCallbacks {
  HttpHandler handle;
  HttpHeadCheck check_head;
  HttpErrorBody error_body;
};

/// Which pages of browsers may read answers; "*" stands for all.
struct CorsOptions {
  std::vector<std::string> origins;  // "https://example.org"; none: CORS is off
  std::vector<std::string> methods = {"*"};
  std::vector<std::string> headers = {"*"};
  bool credentials = false;
};

struct HttpOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;  // 0: any free port
  int threads = 2;
  uint64_t body_limit = uint64_t{16} << 20;   // bytes; more is answered with 413
  uint64_t bodies_limit = uint64_t{1} << 30;  // of all requests together; more is answered with 503
  uint32_t header_limit = 32 << 10;           // bytes; more is answered with 431
  double read_timeout_s = 30;                 // for one request to arrive, from its first byte
  double idle_timeout_s = 75;                 // for a kept connection to send its next request
  double write_timeout_s = 60;                // without any progress: the client counts as gone
  double ping_interval_s = 15;                // a comment line in a silent event stream
  CorsOptions cors = {};
};

/// HTTP/1.1 server on its own threads. Hides the network library.
class HttpServer {
 public:
  /// Listens and begins to serve. Errors: kInvalidArgument for a host that is no address,
  /// kIo for a port in use or not permitted.
  static Result<std::unique_ptr<HttpServer>> start(const HttpOptions& options,
                                                   HttpCallbacks callbacks);
  /// Closes every connection at once and joins the threads.
  virtual ~HttpServer() = default;

  /// The port that is listened on.
  [[nodiscard]] virtual uint16_t port() const = 0;
  /// Closes idle connections; answers begun are finished, and every connection is closed after its
  /// current answer. New connections are still answered, so that clients learn what happens.
  virtual void begin_drain() = 0;
  /// Closes the listening port, and connections without a request under way.
  virtual void stop_listening() = 0;
  /// Waits until no connection is left; false when `timeout_s` is over first.
  virtual bool wait_idle(double timeout_s) = 0;
};

/// "Not Found" for 404.
[[nodiscard]] std::string_view reason_phrase(int status);
/// 32 random hexadecimal digits.
[[nodiscard]] std::string random_id();

}  // namespace nibble
