#include "server/http_text.h"

#include <algorithm>
#include <charconv>
#include <random>

#include <fmt/format.h>
#include <strings.h>

namespace nibble {
namespace {

/// Compares as HTTP compares names: without regard to case.
bool same_name(std::string_view a, std::string_view b) {
  return a.size() == b.size() && strncasecmp(a.data(), b.data(), a.size()) == 0;
}

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t";
  const size_t begin = std::min(text.find_first_not_of(kBlanks), text.size());
  text.remove_prefix(begin);
  return text.substr(0, text.find_last_not_of(kBlanks) + 1);
}

}  // namespace

std::string_view HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (same_name(key, name)) {
      return value;
    }
  }
  return {};
}

std::string_view reason_phrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 413:
      return "Payload Too Large";
    case 415:
      return "Unsupported Media Type";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    default:
      return "Unknown";
  }
}

std::string random_id() {
  thread_local std::mt19937_64 generator{[] {
    std::random_device device;
    std::seed_seq seed{device(), device(), device(), device()};
    return std::mt19937_64(seed);
  }()};
  return fmt::format("{:016x}{:016x}", generator(), generator());
}

std::string response_head(const ResponseHead& head, const HttpHeaders& headers) {
  std::string out =
      fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nX-Request-Id: {}\r\nConnection: {}\r\n",
                  head.status, reason_phrase(head.status), head.content_type, head.request_id,
                  head.keep_alive ? "keep-alive" : "close");
  for (const auto& [name, value] : headers) {
    out += fmt::format("{}: {}\r\n", name, value);
  }
  return out;
}

HttpTarget parse_target(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (target.size() >= scheme.size() &&
        strncasecmp(target.data(), scheme.data(), scheme.size()) == 0) {
      const size_t path = target.find_first_of("/?", scheme.size());
      target = path == std::string_view::npos ? "/" : target.substr(path);
      break;
    }
  }
  const size_t mark = target.find('?');
  return {.path = percent_decode(target.substr(0, mark)),
          .query = std::string(mark == std::string_view::npos ? "" : target.substr(mark + 1))};
}

std::string percent_decode(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(&text[i + 1], &text[i + 1] + 2, value, 16).ptr == &text[i + 1] + 2) {
      out += static_cast<char>(value);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string_view content_coding(const HttpHeaders& headers) {
  for (const auto& [name, value] : headers) {
    if (!same_name(name, "Content-Encoding")) {
      continue;
    }
    std::string_view rest = value;
    while (!rest.empty()) {
      const size_t comma = std::min(rest.find(','), rest.size());
      const std::string_view coding = trimmed(rest.substr(0, comma));
      if (!coding.empty() && !same_name(coding, "identity")) {
        return coding;
      }
      rest.remove_prefix(std::min(comma + 1, rest.size()));
    }
  }
  return {};
}

std::string usable_request_id(std::string_view given) {
  constexpr size_t kLongest = 128;
  // What could end a quotation is left out: ids are pasted into logs, queries and shells.
  const bool plain = std::all_of(given.begin(), given.end(), [](char c) {
    return c > ' ' && c < 0x7f && std::string_view("\"'`\\").find(c) == std::string_view::npos;
  });
  return !given.empty() && given.size() <= kLongest && plain ? std::string(given) : random_id();
}

}  // namespace nibble
