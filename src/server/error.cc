#include "server/error.h"

#include "base/json.h"

namespace nibble {
namespace {

constexpr size_t kMostShown = 1000;  // bytes: messages quote what clients send
constexpr size_t kQuoted = 64;       // bytes of one text of a client

/// At most so many bytes, cut between characters.
std::string shortened(std::string_view text, size_t most) {
  if (text.size() <= most) {
    return std::string(text);
  }
  while (most > 0 && (static_cast<unsigned char>(text[most]) & 0xC0U) == 0x80U) {
    --most;
  }
  return std::string(text.substr(0, most)) + "...";
}

/// The "type" of Anthropic's errors.
std::string_view anthropic_error_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    case 504:
      return "timeout_error";
    default:
      return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

}  // namespace

std::string shown(std::string_view text) { return shortened(text, kQuoted); }

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
    case 504:
      return "timeout_error";
    default:
      return status >= 500 ? "server_error" : "invalid_request_error";
  }
}

std::string error_json(const ApiError& error) {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? Json() : Json(shortened(text, kMostShown));
  };
  const Json body = Json::object({{"message", shortened(error.message, kMostShown)},
                                  {"type", error_type(error.status)},
                                  {"param", text_or_null(error.param)},
                                  {"code", text_or_null(error.code)}});
  return Json::object({{"error", body}}).dump();
}

std::string anthropic_error_json(const ApiError& error) {
  const Json body = Json::object({{"type", anthropic_error_type(error.status)},
                                  {"message", shortened(error.message, kMostShown)}});
  return Json::object({{"type", "error"}, {"error", body}}).dump();
}

ErrorShape error_shape(std::string_view path) {
  constexpr std::string_view kMessages = "/v1/messages";
  const bool anthropic = path.starts_with(kMessages) &&
                         (path.size() == kMessages.size() || path[kMessages.size()] == '/');
  return anthropic ? ErrorShape::kAnthropic : ErrorShape::kOpenAi;
}

void refuse(HttpExchange& exchange, const ApiError& error) {
  exchange.respond(error_response(error, error_shape(exchange.request().path)));
}

HttpResponse error_response(const ApiError& error, ErrorShape shape) {
  HttpResponse response{
      .status = error.status,
      .body = shape == ErrorShape::kAnthropic ? anthropic_error_json(error) : error_json(error)};
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
