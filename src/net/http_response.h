#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// What stands in front of an answer's body.
struct HttpHead {
  int status = 0;
  std::string content_type;
  std::string retry_after;
};

/// Reads one HTTP/1.1 answer from the bytes of a connection, chunked or not. Interim answers (1xx)
/// are passed over. Bounded: heads above 32 KiB are kCorrupt; bodies pass through.
class HttpResponseParser final {
 public:
  struct Sinks {
    std::function<void(const HttpHead&)> on_head;
    std::function<void(std::string_view)> on_body;  // what has come of the body, without framing
  };

  explicit HttpResponseParser(Sinks sinks);
  ~HttpResponseParser();

  /// Takes all of `bytes`. kCorrupt for what is no answer, and for bytes after its end.
  Status push(std::string_view bytes);
  /// The connection is at its end: kUnavailable if the answer is not.
  Status finish();
  [[nodiscard]] bool done() const;
  /// Whether another request may follow on this connection, once done.
  [[nodiscard]] bool keeps_alive() const;

 private:
  class Parser;

  Status feed(std::string_view& bytes);

  Sinks sinks_;
  std::unique_ptr<Parser> parser_;
  std::string held_;  // of a head or of a chunk's frame that has not all come
};

}  // namespace nibble
