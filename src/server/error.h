#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "server/http.h"

namespace nibble {

/// An error as clients see it: {"error": {message, type, param, code}}.
struct ApiError {
  int status = 400;
  std::string message;
  std::string param;  // the request field; "" becomes null
  std::string code;   // OpenAI's code; "" becomes null
};

/// The "type" that belongs to an HTTP status ("invalid_request_error" for 400).
[[nodiscard]] std::string_view error_type(int status);
/// The error object as JSON text.
[[nodiscard]] std::string error_json(const ApiError& error);
/// How a route words its errors: {"error": {...}} as above, or {"type": "error", "error": {"type",
/// "message"}}.
enum class ErrorShape { kOpenAi, kAnthropic };
[[nodiscard]] ErrorShape error_shape(std::string_view path);
/// The same in Anthropic's shape.
[[nodiscard]] std::string anthropic_error_json(const ApiError& error);
/// The whole answer; 429 carries Retry-After.
[[nodiscard]] HttpResponse error_response(const ApiError& error,
                                          ErrorShape shape = ErrorShape::kOpenAi);
/// Answers with an error in the shape of the exchange's route.
void refuse(HttpExchange& exchange, const ApiError& error);
/// What is shown of a text that a client sent: at most 64 bytes, whole characters, and "..." for
/// the rest.
[[nodiscard]] std::string shown(std::string_view text);
/// What a failure inside means outside: 400 for a bad argument, 429 for a full queue, 503 when
/// shutting down, 500 otherwise.
[[nodiscard]] ApiError to_api_error(const Status& status);

}  // namespace nibble
