#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace nibble {

/// Where a server is. Servers are reached in plain HTTP.
struct Url {
  std::string host;  // a name or an address, IPv6 without brackets
  uint16_t port = 80;
  std::string path;  // in front of every route: "" or "/prefix", without a slash at its end

  /// "http://host:port/path", with brackets around IPv6.
  [[nodiscard]] std::string text() const;
  /// "host:port", as a Host header has it.
  [[nodiscard]] std::string authority() const;
};

/// Reads "http://host:port/path" or "host:port". A "/v1" at the end, which many clients want in
/// their base URL, is left out: the routes below have it. kInvalidArgument for anything else, with
/// the remedy for https.
Result<Url> parse_url(std::string_view text);

}  // namespace nibble
