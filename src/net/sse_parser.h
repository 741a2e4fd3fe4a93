#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// One server-sent event. The views live until the sink returns.
struct SseEvent {
  std::string_view name;  // of its `event:` line; empty without one
  std::string_view data;  // its `data:` lines, joined by line feeds
};

/// Takes a stream of server-sent events apart (WHATWG HTML, section 9.2). Lines end in LF, CRLF or
/// CR; comments, ids and retry times are passed over. How the bytes are cut changes nothing.
class SseParser final {
 public:
  using Sink = std::function<void(const SseEvent&)>;
  static constexpr size_t kLimit = size_t{16} << 20;

  /// limit: most bytes of an unfinished event
  explicit SseParser(Sink sink, size_t limit = kLimit) : sink_(std::move(sink)), limit_(limit) {}

  /// kCorrupt when an event is longer than the limit; nothing more is taken then.
  Status push(std::string_view bytes);
  /// The stream is over. An event that lacks only the empty line behind it counts.
  void finish();

 private:
  void take_line(std::string_view line);
  void dispatch();

  Sink sink_;
  size_t limit_;
  std::string line_;  // the part of it that has come
  std::string name_;
  std::string data_;
  bool has_data_ = false;
  bool first_line_ = true;
  bool after_cr_ = false;  // a line feed that follows belongs to the line before
};

}  // namespace nibble
