#include "server/http_cors.h"

#include <algorithm>

#include <fmt/format.h>
#include <strings.h>

namespace nibble {
namespace {

constexpr std::string_view kAll = "*";
constexpr const char* kMethods = "GET, POST, DELETE, HEAD, OPTIONS";

bool same_name(std::string_view a, std::string_view b) {
  return a.size() == b.size() && strncasecmp(a.data(), b.data(), a.size()) == 0;
}

bool lists(const std::vector<std::string>& list, std::string_view name) {
  return std::any_of(list.begin(), list.end(),
                     [&](const std::string& one) { return one == kAll || same_name(one, name); });
}

/// Of a header that lists names: "a, b".
bool lists_all(const std::vector<std::string>& list, std::string_view names) {
  constexpr std::string_view kBlanks = " \t,";
  while (true) {
    names.remove_prefix(std::min(names.find_first_not_of(kBlanks), names.size()));
    if (names.empty()) {
      return true;
    }
    const std::string_view name = names.substr(0, names.find_first_of(kBlanks));
    if (!lists(list, name)) {
      return false;
    }
    names.remove_prefix(name.size());
  }
}

HttpResponse refusal(std::string_view what) {
  return {.status = 400,
          .content_type = "text/plain; charset=utf-8",
          .body = fmt::format("CORS: this {} is not allowed\n", what)};
}

}  // namespace

HttpHeaders cors_headers(const CorsOptions& options, const HttpRequest& request) {
  const std::string_view origin = request.header("Origin");
  if (options.origins.empty()) {
    return {};
  }
  const bool any =
      std::find(options.origins.begin(), options.origins.end(), kAll) != options.origins.end();
  if (any && !options.credentials) {
    return origin.empty() ? HttpHeaders() : HttpHeaders{{"Access-Control-Allow-Origin", "*"}};
  }
  HttpHeaders headers{{"Vary", "Origin"}};  // caches must not mix the answers to origins
  if (!origin.empty() && lists(options.origins, origin)) {
    headers.emplace_back("Access-Control-Allow-Origin", origin);
    if (options.credentials) {
      headers.emplace_back("Access-Control-Allow-Credentials", "true");
    }
  }
  return headers;
}

std::optional<HttpResponse> cors_preflight(const CorsOptions& options, const HttpRequest& request) {
  const std::string_view origin = request.header("Origin");
  const std::string_view method = request.header("Access-Control-Request-Method");
  const std::string_view names = request.header("Access-Control-Request-Headers");
  if (options.origins.empty() || request.method != "OPTIONS" || origin.empty() || method.empty()) {
    return std::nullopt;
  }
  if (!lists(options.origins, origin)) {
    return refusal("origin");
  }
  if (!lists(options.methods, method)) {
    return refusal("method");
  }
  if (!lists_all(options.headers, names)) {
    return refusal("header");
  }
  const bool any_method = lists(options.methods, kAll);
  HttpResponse answer{.content_type = "text/plain; charset=utf-8"};
  answer.headers = {{"Access-Control-Allow-Methods",
                     any_method ? kMethods : fmt::format("{}", fmt::join(options.methods, ", "))},
                    {"Access-Control-Max-Age", "600"}};
  if (!names.empty()) {
    answer.headers.emplace_back("Access-Control-Allow-Headers", names);
  }
  return answer;
}

}  // namespace nibble
