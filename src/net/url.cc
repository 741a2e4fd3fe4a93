#include "net/url.h"

#include <charconv>

namespace nibble {
namespace {

Status bad(std::string_view text, std::string_view why) {
  return make_error(StatusCode::kInvalidArgument, "URL {}: {}; give one like http://127.0.0.1:8000",
                    text, why);
}

/// Splits "host", "host:port", "[v6]" or "[v6]:port".
bool split_authority(std::string_view authority, std::string_view& host, std::string_view& port) {
  if (authority.starts_with('[')) {
    const size_t end = authority.find(']');
    if (end == std::string_view::npos) {
      return false;
    }
    host = authority.substr(1, end - 1);
    authority.remove_prefix(end + 1);
    if (!authority.empty() && authority.front() != ':') {
      return false;
    }
    port = authority.empty() ? authority : authority.substr(1);
    return true;
  }
  const size_t colon = authority.find(':');
  host = authority.substr(0, colon);
  port = colon == std::string_view::npos ? std::string_view() : authority.substr(colon + 1);
  return true;
}

}  // namespace

std::string Url::authority() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

std::string Url::text() const { return "http://" + authority() + path; }

Result<Url> parse_url(std::string_view text) {
  std::string_view rest = text;
  if (rest.starts_with("https://")) {
    return make_error(StatusCode::kInvalidArgument,
                      "URL {}: this program speaks plain HTTP; reach the server through a local "
                      "proxy or tunnel that ends the TLS",
                      text);
  }
  if (const size_t scheme = rest.find("://"); scheme != std::string_view::npos) {
    if (rest.substr(0, scheme) != "http") {
      return bad(text, "the scheme is not http");
    }
    rest.remove_prefix(scheme + 3);
  }
  for (const char c : rest) {
    if (c <= ' ' || c > '~' || c == '@' || c == '?' || c == '#') {
      return bad(text, "has a character that does not belong there");
    }
  }
  const size_t slash = rest.find('/');
  std::string_view host;
  std::string_view port;
  if (!split_authority(rest.substr(0, slash), host, port) || host.empty()) {
    return bad(text, "has no host");
  }
  Url out;
  out.host = host;
  const char* end = port.data() + port.size();
  if (!port.empty()) {
    const auto [read, error] = std::from_chars(port.data(), end, out.port);
    if (error != std::errc() || read != end || out.port == 0) {
      return bad(text, fmt::format("{} is no port", port));
    }
  }
  std::string_view path = slash == std::string_view::npos ? "" : rest.substr(slash);
  while (path.ends_with('/') || path.ends_with("/v1")) {
    path.remove_suffix(path.ends_with('/') ? 1 : 3);
  }
  out.path = path;
  return out;
}

}  // namespace nibble
