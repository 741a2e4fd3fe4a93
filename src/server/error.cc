#include "server/error.h"

#include "base/json.h"

namespace nibble {
namespace {

constexpr size_t kMostShown = 1000;  // bytes: messages quote what clients send

}  // namespace

std::string_view error_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "unavailable_error";
    default:
      return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

std::string error_json(const ApiError& error) {
  const auto shortened = [](const std::string& text) {
    return text.size() <= kMostShown ? text : text.substr(0, kMostShown) + "...";
  };
  const auto text_or_null = [&](const std::string& text) {
    return text.empty() ? Json() : Json(shortened(text));
  };
  const Json body = Json::object({{"message", shortened(error.message)},
                                  {"type", error_type(error.status)},
                                  {"param", text_or_null(error.param)},
                                  {"code", text_or_null(error.code)}});
  return Json::object({{"error", body}}).dump();
}

HttpResponse error_response(const ApiError& error) {
  HttpResponse response{.status = error.status, .body = error_json(error)};
  if (error.status == 429) {
    response.headers.emplace_back("Retry-After", "1");
  } else if (error.status == 401) {
    response.headers.emplace_back("WWW-Authenticate", "Bearer");
  }
  return response;
}

ApiError to_api_error(const Status& status) {
  switch (status.code()) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kUnsupported:
    case StatusCode::kCorrupt:
      return {400, status.message(), "", ""};
    case StatusCode::kNotFound:
      return {404, status.message(), "", ""};
    case StatusCode::kResourceExhausted:
      return {429, status.message(), "", "rate_limit_exceeded"};
    case StatusCode::kUnavailable:
      return {503, status.message(), "", ""};
    default:
      return {500, status.message(), "", ""};
  }
}

}  // namespace nibble
