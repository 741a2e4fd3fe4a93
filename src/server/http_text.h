#pragma once

#include <string>
#include <string_view>

#include "server/http.h"

namespace nibble {

/// What the status line and the fixed headers say.
struct ResponseHead {
  int status = 200;
  std::string content_type;
  std::string request_id;
  bool keep_alive = true;
};

/// Status line and headers, up to but without the length and the empty line.
[[nodiscard]] std::string response_head(const ResponseHead& head, const HttpHeaders& headers);
/// What the request line asks for.
struct HttpTarget {
  std::string path;   // decoded
  std::string query;  // without the question mark
};

/// Reads "/path?query" and the absolute form "http://host/path?query".
[[nodiscard]] HttpTarget parse_target(std::string_view target);
/// "%2F" becomes "/"; sequences that are no escape stay.
[[nodiscard]] std::string percent_decode(std::string_view text);
/// The first coding of the Content-Encoding fields that changes a body; "" if there is none.
[[nodiscard]] std::string_view content_coding(const HttpHeaders& headers);
/// `given` if it is 1 to 128 printable ASCII characters without blanks, quotes and backslashes,
/// else a random id.
[[nodiscard]] std::string usable_request_id(std::string_view given);

}  // namespace nibble
