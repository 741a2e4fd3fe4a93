#pragma once

#include <string>

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
/// The whole answer; 429 carries Retry-After.
[[nodiscard]] HttpResponse error_response(const ApiError& error);
/// What a failure inside means outside: 400 for a bad argument, 429 for a full queue, 503 when
/// shutting down, 500 otherwise.
[[nodiscard]] ApiError to_api_error(const Status& status);

}  // namespace nibble
